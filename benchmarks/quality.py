"""Measures the accuracy of quantised weights beside llama.cpp: the bundled model on held-out text, both over HTTP.

    python -m benchmarks.quality --program llama-server --quantizer llama-quantize

The log-probabilities of tokens in held-out conversations are compared with transformers in float32, for three models:
the bundled one, one with outliers in the weights, one with outliers in the activations. Outliers are 1 % of the columns
after every norm: the column is scaled by 32 and its norm weight by 1/32, or the other way round. In float32 the three
models are the same, so every difference is a quantisation error.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from bench.launch import cellar, started
from bench.target import BenchError
from benchmarks.known import PEERS, Resources
from benchmarks.result import add_json_option, measured
from benchmarks.shapes import write_gguf
from engine.load.resources import processor_count
from models.recipe.evaluate import held_out_texts
from models.recipe.plan import TARGET

# A power of two moves no bit of a bfloat16 weight but its exponent.
TIMES, SHARE = 32.0, 0.01
PEER_BITS = {"int8": "Q8_0", "int4": "Q4_0"}
# The peer lists its LISTED most likely tokens, so only tokens among the LIKELY first in float32 are compared.
LISTED, LIKELY = 256, 32
AT_ONCE = 4
NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
OUTLIERS = {"none": 1.0, "in weights": TIMES, "in activations": 1 / TIMES}


@dataclass(frozen=True, slots=True)
class Place:
    """A token to predict from the tokens before it; `truth` is its log-probability in float32."""

    text: int
    position: int
    truth: float


@dataclass(frozen=True, slots=True)
class Loss:
    """The error of one server.

    perplexity  relative to float32
    distance    root mean square error of the tokens' log-probabilities, nats
    """

    perplexity: float
    distance: float


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write quality.json; 2 if a program is missing."""
    parser = argparse.ArgumentParser(prog="benchmarks.quality", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--program", default=None, metavar="PATH", help="llama-server")
    parser.add_argument("--quantizer", default="llama-quantize", metavar="PATH", help="llama-quantize")
    parser.add_argument("--texts", type=int, default=40, metavar="N", help="held-out conversations (default 40)")
    parser.add_argument("--every", type=int, default=4, metavar="N", help="compare every N-th token (default 4)")
    parser.add_argument("--out", type=Path, default=Path("out/quality"), metavar="FOLDER", help="default: out/quality")
    add_json_option(parser)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        found = asyncio.run(compare(given))
    except BenchError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    Console(width=110).print(table(found))
    path = given.json or given.out / "quality.json"
    measured("quality", result_rows(found)).write(path)
    print(path)
    return 0


async def compare(given: argparse.Namespace) -> dict[tuple[str, str, str], Loss]:
    """Return the error by outliers, weight format and server."""
    texts = held_out_texts(given.texts)
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
            for outliers, times in OUTLIERS.items():
                folder = Path(scratch) / outliers.replace(" ", "-")
                plant(TARGET.folder, folder, times)
                places = list(likely(folder, texts, given.every))
                for bits, name in PEER_BITS.items():
                    with ours(folder, bits, given.out) as url:
                        found[outliers, bits, "Cellar"] = loss(places, await ask_ours(http, url, texts, places))
                    with theirs(quantised(folder, given.quantizer, name), given.program, given.out) as url:
                        found[outliers, bits, "llama.cpp"] = loss(places, await ask_peer(http, url, texts, places))
    return found


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


def likely(folder: Path, texts: Sequence[list[int]], every: int) -> Iterator[Place]:
    """Yield every N-th token of the texts that is likely enough in float32 to be listed by the peer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for number, text in enumerate(texts):
        with torch.inference_mode():
            scores = model(input_ids=torch.tensor([text]), use_cache=False).logits[0].log_softmax(-1)
        for position in range(1 + number % every, len(text), every):
            row = scores[position - 1]
            truth = row[text[position]]
            if int((row > truth).sum()) < LIKELY:
                yield Place(number, position, float(truth))


def ours(folder: Path, bits: str, out: Path, *more: str) -> AbstractContextManager[str]:
    """Start Cellar without drafts."""
    return cellar((str(folder), "--quantize", bits, "--drafter", "none", *more), out / "cellar.log")


def theirs(file: Path, program: str | None, out: Path) -> AbstractContextManager[str]:
    """Start llama.cpp."""
    peer = PEERS["llama.cpp"]
    resources = Resources(threads=processor_count(), slots=AT_ONCE, context=4096)
    return started(peer.command(program, str(file), resources), ready=peer.ready, log=out / "llama.cpp.log")


def quantised(folder: Path, program: str, name: str) -> Path:
    """Return the quantised GGUF file of a folder; BenchError if llama-quantize fails."""
    raw, file = folder / "bf16.gguf", folder / f"{name}.gguf"
    # The bundled model's own pre-tokenizer has no name in GGUF; requests have token ids.
    write_gguf(folder, raw, "smollm")
    try:
        subprocess.run([program, "--pure", str(raw), str(file), name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchError(f"{program} did not write {name}: {error}") from error
    return file


async def ask_ours(
    http: httpx.AsyncClient, url: str, texts: Sequence[list[int]], places: Sequence[Place]
) -> list[float]:
    """Return the log-probabilities of the places; one request for each text."""
    scored = {}
    for number in dict.fromkeys(place.text for place in places):
        body = {"prompt": texts[number], "max_tokens": 0, "prompt_logprobs": 0}
        answer = await http.post(f"{url}/completions", json=body)
        scored[number] = answer.raise_for_status().json()["choices"][0]["prompt_logprobs"]
    return [scored[one.text][one.position][str(texts[one.text][one.position])]["logprob"] for one in places]


async def ask_peer(
    http: httpx.AsyncClient, url: str, texts: Sequence[list[int]], places: Sequence[Place]
) -> list[float]:
    """Return the log-probabilities of the places, one request for each; the lowest listed one for an unlisted token."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def ask(place: Place) -> float:
        text = texts[place.text]
        body = {"prompt": text[: place.position], "n_predict": 1, "n_probs": LISTED}
        async with limit:
            answer = await http.post(url.removesuffix("/v1") + "/completion", json=body)
        (token,) = answer.raise_for_status().json()["completion_probabilities"]
        listed = {entry["id"]: float(entry["logprob"]) for entry in token["top_logprobs"]}
        return listed.get(text[place.position], min(listed.values()))

    return await asyncio.gather(*(ask(place) for place in places))


def loss(places: Sequence[Place], scores: Sequence[float]) -> Loss:
    """Return the error of log-probabilities."""
    gaps = [place.truth - one for place, one in zip(places, scores, strict=True)]
    return Loss(math.exp(sum(gaps) / len(gaps)), math.sqrt(sum(gap * gap for gap in gaps) / len(gaps)))


def table(found: Mapping[tuple[str, str, str], Loss]) -> Table:
    """Return the printed table."""
    result = Table(caption="perplexity relative to float32; distance: root mean square error, nats a token")
    for heading in ("weights", "bits", "side", "perplexity", "distance"):
        result.add_column(heading, justify="right" if heading in ("perplexity", "distance") else "left")
    for key, one in found.items():
        result.add_row(*key, f"{100 * (one.perplexity - 1):+.2f} %", f"{one.distance:.4f}")
    return result


def result_rows(found: Mapping[tuple[str, str, str], Loss]) -> Iterator[dict[str, str | float]]:
    """Yield the rows of the result."""
    for (outliers, bits, side), one in found.items():
        yield {"weights": bits, "outliers": outliers, "server": side} | asdict(one)


if __name__ == "__main__":
    sys.exit(main())
