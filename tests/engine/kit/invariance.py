"""Whether the logits of a sequence in a quantised model are bit for bit independent of the batch.

`python -W ignore -m tests.engine.kit.invariance` prints the second table of docs/models-checked.md (minutes).
Arguments: names of families; `int4`; `torch`: no C++ library; `variant`: no row-invariant products; `texts`: compare
greedy texts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine.kernels import dispatch, linear, reference
from engine.kernels.products import TiledProduct
from engine.kernels.rounding import Bits
from engine.load.check import selection as selection
from engine.load.check.selftest import ModelTraits, find_runner
from engine.model import hooks, recurrence
from engine.native.runner import NativeRunner
from engine.quantize.calibration import CalibrationText, calibrate
from engine.quantize.plan import LayerSurvey
from engine.quantize.quantize import quantize
from engine.quantize.store import WeightStore
from engine.run.packed import PackedRunner
from engine.run.runner import ModelRunner, runners_of
from engine.step.input import StepInput
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine.kit.tiny import FAMILIES, VOCABULARY, settings

LENGTH, CONTEXT, SLOTS = 40, 64, 4
CHUNKS = (1, 7, 16)
ANSWER = 20


@dataclass(frozen=True, slots=True)
class Quantised:
    """A tiny quantised model of one family with its runner."""

    name: str
    model: Any
    runner: ModelRunner
    traits: ModelTraits

    @property
    def path(self) -> str:
        """The kind of its runner."""
        if isinstance(runners_of(self.runner)[0], NativeRunner):
            return "native"
        return "packed" if isinstance(self.runner, PackedRunner) else "sequential"

    def cache(self) -> Cache:
        """An empty cache."""
        specs = [plan.spec for plan in self.runner.layers]
        state_bytes = 2**30 if self.traits.recurrent else None
        return Cache(specs, slots=SLOTS, capacity=CONTEXT, cells=SLOTS * CONTEXT, state_bytes=state_bytes)

    def feed(self, cache: Cache, *parts: tuple[int, Sequence[int]]) -> list[Tensor]:
        """One forward that appends (slot, tokens) parts; the logits of all tokens, by part."""
        spans = [Span(slot, cache.cached_length(slot), len(tokens)) for slot, tokens in parts]
        tokens = [token for _, tokens in parts for token in tokens]
        with cache.forward(spans) as forward:
            logits = self.runner.run(StepInput(forward, tokens, list(range(len(tokens))))).logits
        return list(logits.split([span.length for span in spans]))


def build(name: str, bits: Bits = 8, *, native: bool = True, invariant: bool = True, **own: Any) -> Quantised:
    """The quantised model of a family; without `native` no C++ library is used.

    invariant  whether modules are made batch invariant
    own        settings of the model in place of the family's
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **settings(name) | own)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.requires_grad_(False)
    recurrent = recurrence.install(model)
    hooks.install_latent(model)
    hooks.install_bias(model)
    attend = dispatch.attention_kernel(torch.float32, torch.float32) if native else reference.attend
    traits = ModelTraits(vocabulary=VOCABULARY, recurrent=recurrent, dtype=torch.float32, attend=attend)
    survey = LayerSurvey(model)
    runner = find_runner(name, model, traits)
    plan, prepare = survey.close(), dispatch.best_linear() if native else linear.prepare
    # Several formats in one model.
    text = CalibrationText("a text" * 20, lambda part: prompt(len(part), 2 * LENGTH))
    quantize(
        model,
        plan,
        WeightStore(name, bits),
        prepare,
        lambda: calibrate(model, plan, text, hooks.use_attention(model, "eager")),
    )
    if native:
        runner = selection.select(model, runner, traits, context=CONTEXT).runner
    if invariant:
        runner.make_invariant(dispatch.best_row_invariant() if native else TiledProduct())
    return Quantised(name, model, runner, traits)


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def equal(expected: Tensor, actual: Tensor) -> bool:
    """Whether two tensors are equal bit for bit."""
    return torch.equal(expected, actual)


def batched(model: Quantised) -> bool:
    """Sequences in one forward, and single tokens behind them, get the logits of each alone."""
    texts = [prompt(seed, length) for seed, length in ((0, LENGTH), (1, 3), (2, 23), (3, 16))]
    together, neighbours = model.cache(), [(slot, text[:-1]) for slot, text in enumerate(texts)]
    rows = model.feed(together, *neighbours)
    last = model.feed(together, *((slot, text[-1:]) for slot, text in enumerate(texts)))
    for text, own, end in zip(texts, rows, last, strict=True):
        cache = model.cache()
        if not (equal(model.feed(cache, (0, text[:-1]))[0], own) and equal(model.feed(cache, (0, text[-1:]))[0], end)):
            return False
    return True


def chunked(model: Quantised) -> bool:
    """A prompt in chunks of 1, 7 and 16, in a batch with another sequence, gets the logits of one forward."""
    text, expected = prompt(0), model.feed(model.cache(), (0, prompt(0)))[0]
    for size in CHUNKS:
        cache, rows = model.cache(), []
        for at in range(0, LENGTH, size):
            rows.append(model.feed(cache, (3, [5]), (1, text[at : at + size]))[1])
        if not equal(expected, torch.cat(rows)):
            return False
    return True


def resumed(model: Quantised) -> bool:
    """Tokens behind a prefix of the cache get the logits of an empty cache."""
    text, cache = prompt(0), model.cache()
    expected = model.feed(model.cache(), (0, text))[0]
    for at in range(0, LENGTH, 10):
        model.feed(cache, (0, text[at : at + 10]))
    for length in (1, 9, 17, 30, 39):
        cached = cache.copy_prefix(0, 1, length)
        if not equal(expected[cached:], model.feed(cache, (1, text[cached:]))[0]):
            return False
    return True


CHECKS: dict[str, Callable[[Quantised], bool]] = {
    "batched = alone": batched,
    "chunks": chunked,
    "prefix hit": resumed,
}


def greedy(model: Quantised, text: Sequence[int], size: int = LENGTH, *others: Sequence[int]) -> list[int]:
    """The greedy completion of a prompt in chunks of `size`, in a batch with other prompts."""
    cache, answer = model.cache(), list[int]()
    neighbours = [(slot + 1, list(other)) for slot, other in enumerate(others)]
    for at in range(0, len(text), size):
        parts = [(0, text[at : at + size]), *neighbours] if at == 0 else [(0, text[at : at + size])]
        row = model.feed(cache, *parts)[0][-1]
    for _ in range(ANSWER):
        answer.append(int(row.argmax()))
        rows = model.feed(cache, (0, answer[-1:]), *((slot, [7]) for slot, _ in neighbours))
        row = rows[0][-1]
    return answer


def texts(model: Quantised, count: int = 10) -> dict[str, int]:
    """The number of `count` prompts with the same greedy text as alone in one chunk."""
    same = {"beside neighbours": 0, "chunks of 7": 0, "chunks of 16": 0}
    for seed in range(count):
        text, others = prompt(seed), [prompt(100 + seed, 5), prompt(200 + seed, 17)]
        alone = greedy(model, text)
        same["beside neighbours"] += greedy(model, text, LENGTH, *others) == alone
        same["chunks of 7"] += greedy(model, text, 7) == alone
        same["chunks of 16"] += greedy(model, text, 16) == alone
    return same


def table(names: Sequence[str], bits: Bits, **choices: Any) -> Iterator[str]:
    """The lines of the table of docs/models-checked.md."""
    yield f"| family | int{bits}, computed | {' | '.join(f'int{bits}, {check}' for check in CHECKS)} |"
    yield f"|{'---|' * (2 + len(CHECKS))}"
    for name in names:
        model = build(name, bits, **choices)
        results = ("PASS" if holds(model) else "FAIL" for holds in CHECKS.values())
        yield f"| {name} | {model.path} | {' | '.join(results)} |"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    words = sys.argv[1:]
    families = [word for word in words if word in FAMILIES] or sorted(FAMILIES)
    bits: Bits = 4 if "int4" in words else 8
    choices = {"native": "torch" not in words, "invariant": "variant" not in words}
    if "texts" in words:
        rows = (f"{name}: {texts(build(name, bits, **choices))}" for name in families)
    else:
        rows = table(families, bits, **choices)
    for line in rows:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
