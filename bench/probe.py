"""What a server is like, found by asking it: availability, accepted fields, token counts, speed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.cells import Workload
from bench.client import Chat, Prompt, RequestOptions, Server, send
from bench.load_generator import LoadGenerator
from bench.options import Kind
from bench.prompts import WORDS, Prompts, TokenIdPrompts, TokenRatio, WordPrompts, fit_ratio
from bench.samples import OK, Sample
from bench.target import BenchError

# Every word once, so that words drawn at random have as many tokens each; ids, where nothing is counted.
FEW, MANY, IDS = WORDS[:1], WORDS, 8
SPEED_PROMPT_TOKENS, SPEED_ANSWER_TOKENS = 128, 16
# Without a count, three tokens for two words is near enough for English.
DEFAULT_LENGTH = TokenRatio(template_tokens=0.0, word=1.5)
# Throughput of eight streams relative to one on CPUs: two to five times.
BATCH_GAIN = 3.0
# A token of a long prompt takes longer than one of the short prompt that was timed.
DEPTH_LOSS = 1.5


@dataclass(frozen=True, slots=True)
class StreamSpeed:
    """How fast one stream is: tokens of a prompt a second, and seconds a token of its answer."""

    prefill: float
    token: float

    def seconds(self, work: Workload) -> float:
        """About how long some work takes."""
        gain = min(work.streams, BATCH_GAIN)
        return DEPTH_LOSS * work.prompts / self.prefill + work.generated * work.streams * self.token / gain


@dataclass(frozen=True, slots=True)
class ProbedServer:
    """A server that answers, with its load generator and speed."""

    generator: LoadGenerator
    speed: StreamSpeed


async def probe(server: Server, options: RequestOptions, kind: Kind, seed: int) -> ProbedServer:
    """Ask a few short things; BenchError if one of them has no answer."""
    few = TokenIdPrompts(seed).unshared(IDS, "probe") if kind == "ids" else chat_of(FEW)
    sample = await one_token_answer(server, options, few)
    if sample.outcome in ("http 400", "http 422") and "ignore_eos" in options.extra:
        # `ignore_eos` is not OpenAI's, and some servers refuse unknown fields; without it answers may end early.
        options = replace(options, extra={name: value for name, value in options.extra.items() if name != "ignore_eos"})
        sample = await one_token_answer(server, options, few)
    check_sample(server, sample)
    prompts: Prompts = TokenIdPrompts(seed)
    if kind == "text":
        more = check_sample(server, await one_token_answer(server, options, chat_of(MANY)))
        prompts = WordPrompts(measure_length(sample, more), seed)
    generator = LoadGenerator(server, options, prompts)
    return ProbedServer(generator, await measure_speed(generator))


async def one_token_answer(server: Server, options: RequestOptions, prompt: Prompt) -> Sample:
    """What came of a prompt that is answered with one token."""
    return (await send(server, options, prompt=prompt, max_tokens=1, begun=0.0)).read()


async def measure_speed(generator: LoadGenerator) -> StreamSpeed:
    """How fast one stream is, from a single answer."""
    run = await generator.single(generator.prompts.unshared(SPEED_PROMPT_TOKENS, "pace"), SPEED_ANSWER_TOKENS)
    sample = check_sample(generator.server, run.samples[0])
    first = sample.first_token_seconds or sample.finished
    return StreamSpeed(
        prefill=SPEED_PROMPT_TOKENS / first,
        token=sample.seconds_per_token or sample.finished / max(1, sample.completion_tokens),
    )


def chat_of(words: list[str]) -> Chat:
    """A chat of these words."""
    return (("user", " ".join(words)),)


def measure_length(short: Sample, long: Sample) -> TokenRatio:
    """How the server counts words."""
    if short.prompt_tokens is None or long.prompt_tokens is None:
        return DEFAULT_LENGTH
    return fit_ratio((len(FEW), short.prompt_tokens), (len(MANY), long.prompt_tokens))


def check_sample(server: Server, sample: Sample) -> Sample:
    """A whole answer; BenchError says what came in its place."""
    if sample.outcome != OK:
        text = f": {sample.text}" if sample.text else ""
        raise BenchError(f"{server.url} does not answer for {server.model!r}: {sample.outcome}{text}")
    return sample
