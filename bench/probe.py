"""What a server is like, found by asking it: whether it answers, what it takes, how it counts, how fast it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.asker import Asker
from bench.cells import Work
from bench.client import Ask, Chat, Prompt, Server, send
from bench.options import Kind
from bench.prompts import WORDS, Ids, Length, Prompts, Words, length
from bench.samples import OK, Sample
from bench.target import Unusable

# Every word once, so that words drawn at random have as many tokens each; ids, where nothing is counted.
FEW, MANY, IDS = WORDS[:1], WORDS, 8
PACED, SPOKEN = 128, 16
# Without a count, three tokens for two words is near enough for English.
GUESSED = Length(around=0.0, word=1.5)
# What eight streams gain over one on CPUs lies between two and five times, says docs/performance.md.
BATCH_GAIN = 3.0
# A token of a long prompt takes longer than one of the short prompt that was timed.
DEPTH_LOSS = 1.5


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast one stream is: tokens of a prompt a second, and seconds a token of its answer."""

    prefill: float
    token: float

    def seconds(self, work: Work) -> float:
        """About how long some work takes."""
        gain = min(work.streams, BATCH_GAIN)
        return DEPTH_LOSS * work.prompts / self.prefill + work.said * work.streams * self.token / gain


@dataclass(frozen=True, slots=True)
class Found:
    """A server that answers: how to ask it, and how fast it is."""

    asker: Asker
    pace: Pace


async def probe(server: Server, ask: Ask, kind: Kind, seed: int) -> Found:
    """Ask a few short things; Unusable if one of them has no answer."""
    few = Ids(seed).lone(IDS, "probe") if kind == "ids" else said(FEW)
    sample = await asked(server, ask, few)
    if sample.outcome in ("http 400", "http 422") and "ignore_eos" in ask.extra:
        # Not OpenAI's field, and some refuse what they do not know; without it answers may end early.
        ask = replace(ask, extra={name: value for name, value in ask.extra.items() if name != "ignore_eos"})
        sample = await asked(server, ask, few)
    check(server, sample)
    prompts: Prompts = Ids(seed)
    if kind == "text":
        more = check(server, await asked(server, ask, said(MANY)))
        prompts = Words(counted(sample, more), seed)
    asker = Asker(server, ask, prompts)
    return Found(asker, await pace(asker))


async def asked(server: Server, ask: Ask, prompt: Prompt) -> Sample:
    """What came of a prompt that is answered with one token."""
    return (await send(server, ask, prompt=prompt, max_tokens=1, begun=0.0)).read()


async def pace(asker: Asker) -> Pace:
    """How fast one stream is, from a single answer."""
    run = await asker.one(asker.prompts.lone(PACED, "pace"), SPOKEN)
    sample = check(asker.server, run.samples[0])
    first = sample.first or sample.finished
    return Pace(prefill=PACED / first, token=sample.token or sample.finished / max(1, sample.completion_tokens))


def said(words: list[str]) -> Chat:
    """A chat of these words."""
    return (("user", " ".join(words)),)


def counted(few: Sample, many: Sample) -> Length:
    """How the server counts words."""
    if few.prompt_tokens is None or many.prompt_tokens is None:
        return GUESSED
    return length((len(FEW), few.prompt_tokens), (len(MANY), many.prompt_tokens))


def check(server: Server, sample: Sample) -> Sample:
    """A whole answer; Unusable says what came in its place."""
    if sample.outcome != OK:
        said = f": {sample.text}" if sample.text else ""
        raise Unusable(f"{server.url} does not answer for {server.model!r}: {sample.outcome}{said}")
    return sample
