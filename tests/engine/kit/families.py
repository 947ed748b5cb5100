"""One tiny random model for each family, and the checks of the table in docs/models-checked.md.

`python -m tests.engine.kit.families` runs every check on every family and prints the table (minutes).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from engine.load.check.selftest import ModelTraits, find_runner
from engine.model import hooks, recurrence, rope
from engine.model.invariant import StableTopK
from engine.run.packed import PackedRunner
from engine.run.runner import ModelRunner
from engine.step.input import StepInput
from kvcache.cache import Cache
from kvcache.offload import OffloadConfig
from kvcache.spec import Span
from tests.engine.kit.tiny import FAMILIES, VOCABULARY, settings

LENGTH = 24
# The length at which rotary factors change: beyond the positions of the calibration.
ORIGINAL = 32


@dataclass(frozen=True, slots=True)
class Family:
    """A tiny model of one family with its runner, and the prompt of the checks."""

    name: str
    model: Any
    runner: ModelRunner
    recurrent: bool
    prompt: tuple[int, ...]

    def cache(self, shelf: OffloadConfig | None = None) -> Cache:
        """A cache, empty but for the entries of the disk cache."""
        specs = [plan.spec for plan in self.runner.layers]
        state_bytes = 2**30 if self.recurrent else None
        return Cache(specs, slots=4, capacity=2 * LENGTH, cells=8 * LENGTH, state_bytes=state_bytes, offload=shelf)

    def feed(self, cache: Cache, *parts: tuple[int, tuple[int, ...]]) -> list[Tensor]:
        """One forward that appends (slot, tokens) parts; the logits after each part."""
        spans = [Span(slot, cache.cached_length(slot), len(tokens)) for slot, tokens in parts]
        tokens = [token for _, tokens in parts for token in tokens]
        logit_rows = torch.tensor([span.length for span in spans]).cumsum(0) - 1
        with cache.forward(spans) as forward:
            return list(self.runner.run(StepInput(forward, tokens, logit_rows.tolist())).logits)

    def alone(self, tokens: tuple[int, ...]) -> Tensor:
        """The logits after some tokens by transformers, with ties of a selection resolved in order."""
        attention = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        with torch.inference_mode(), StableTopK():
            logits: Tensor = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        self.model.set_attn_implementation(attention)
        return logits

    def extends(self, cache: Cache, length: int) -> bool:
        """Whether a prompt that leaves the family's after `length` tokens gets the logits of an empty cache."""
        prompt = (*self.prompt[:length], 258, 259)
        cached_length = cache.reuse_prefix(1, prompt[:-1])
        right = self.agrees(self.alone(prompt), self.feed(cache, (1, prompt[cached_length:]))[0])
        cache.clear(1)
        return right

    def agrees(self, expected: Tensor, actual: Tensor) -> bool:
        """Whether two rows of logits are equal but for rounding."""
        return float((expected - actual).abs().max()) <= 1e-3 * max(1.0, float(expected.abs().max()))


def build(name: str, **own: Any) -> Family:
    """The model of a family with some settings changed. Raises the errors of transformers if it cannot run packed."""
    # One thread: a second one slows tiny layers down (measured 10 times on busy cores).
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**settings(name), **own})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    plant(model)
    switch, recurrent = rope.install(model), recurrence.install(model)
    hooks.install_latent(model)
    generator = torch.Generator().manual_seed(1)
    prompt = tuple(torch.randint(3, VOCABULARY, (LENGTH,), generator=generator).tolist())
    traits = ModelTraits(vocabulary=VOCABULARY, recurrent=recurrent, dtype=torch.float32, switch=switch)
    return Family(name, model, find_runner(name, model, traits), recurrent, prompt)


def plant(model: Any) -> None:
    """Randomise weights of a selection that are initialised to zeros: scores would be equal, and the selection differ
    from batch to batch: the scale of a dynamic mask (Doge), routers of experts (AFMoE).
    """
    for name, parameter in model.named_parameters():
        is_zero_matrix = name.endswith(".weight") and parameter.dim() > 1 and not parameter.any()
        if name.endswith("self_attn.A") or is_zero_matrix:
            torch.nn.init.normal_(parameter)


def batched(family: Family) -> bool:
    """Three sequences in one forward get the logits of each alone."""
    cache, prompt = family.cache(), family.prompt
    parts = ((0, prompt), (1, prompt[3:]), (2, prompt[9:12]))
    packed = family.feed(cache, *parts)
    return all(family.agrees(family.alone(tokens), row) for (_, tokens), row in zip(parts, packed, strict=True))


def chunked(family: Family) -> bool:
    """A prompt in chunks of 1 and 5, in a batch with another sequence, gets the logits of one forward."""
    expected = family.alone(family.prompt)
    for size in (1, 5):
        cache, row = family.cache(), expected
        for at in range(0, LENGTH, size):
            row = family.feed(cache, (2, family.prompt[at : at + size]), (3, family.prompt[:1]))[0]
        if not family.agrees(expected, row):
            return False
    return True


def copied(family: Family) -> bool:
    """After copy_prefix from a running slot, at every length, the remaining tokens get the logits of an empty cache."""
    expected = family.alone(family.prompt)
    cache = family.cache()
    for at in range(0, LENGTH, 6):
        family.feed(cache, (0, family.prompt[at : at + 6]))
    for length in range(LENGTH):
        cached_length = cache.copy_prefix(0, 1, length)
        if cached_length > length or not family.agrees(
            expected, family.feed(cache, (1, family.prompt[cached_length:]))[0]
        ):
            return False
    return True


def resumed(family: Family) -> bool:
    """A prompt that leaves a cached one at any position gets the logits of an empty cache."""
    cache = family.cache()
    for at in range(0, LENGTH, 6):
        family.feed(cache, (0, family.prompt[at : at + 6]))
        cache.insert_prefix(0, family.prompt[: at + 6])
    cache.clear(0)
    return all(family.extends(cache, length) for length in range(1, LENGTH))


def trimmed(family: Family) -> bool:
    """As `resumed`, after eviction of all but the cells that extend a cached prompt."""
    cache = family.cache()
    family.feed(cache, (0, family.prompt[:8]))
    cache.insert_prefix(0, family.prompt[:8], checkpoint=True)
    family.feed(cache, (0, family.prompt[8:]))
    cache.insert_prefix(0, family.prompt)
    cache.clear(0)
    cache.evict(LENGTH // 2)
    return all(family.extends(cache, length) for length in range(1, LENGTH))


def restarted(family: Family) -> bool:
    """As `resumed`, in a new cache with the files of the first one."""
    with tempfile.TemporaryDirectory() as folder:
        shelf = OffloadConfig(folder=Path(folder), disk_bytes=2**30, identity=family.name)
        cache = family.cache(shelf)
        for at in range(0, LENGTH, 6):
            family.feed(cache, (0, family.prompt[at : at + 6]))
            cache.insert_prefix(0, family.prompt[: at + 6])
        while cache.flush_to_disk(2**30):
            pass
        again = family.cache(shelf)
        found = again.match_prefix(family.prompt).length
        return found == LENGTH and all(family.extends(again, length) for length in range(1, LENGTH))


def verified(family: Family) -> bool:
    """Of three draft tokens the first ones are accepted: their logits, and the following ones, equal the
    logits of an empty cache.
    """
    start, known = 10, 12
    for right in range(4):
        cache = family.cache()
        family.feed(cache, (0, family.prompt[:start]))
        draft = (*family.prompt[known : known + right], 258, 258, 258)[:3]
        with cache.forward([Span(0, start, known - start + 3, draft_tokens=3)]) as forward:
            rows = family.runner.run(StepInput(forward, (*family.prompt[start:known], *draft), [1, 2, 3, 4])).logits
            forward.keep(0, known + right)
        agree = (
            family.agrees(family.alone(family.prompt[: known + at]), row) for at, row in enumerate(rows[: right + 1])
        )
        remaining = family.feed(cache, (0, family.prompt[cache.cached_length(0) :]))[0]
        if not (all(agree) and family.agrees(family.alone(family.prompt), remaining)):
            return False
    return True


def shifted(family: Family) -> str:
    """Whether a context shift rotates keys or recomputes tokens; the cached length is at most the requested one."""
    cache = family.cache()
    family.feed(cache, (0, family.prompt))
    cached_length = cache.shift(0, 4, 8)
    remaining = (*family.prompt[:4], *family.prompt[12:])[cached_length:]
    row = family.feed(cache, (0, (*remaining, 7)))[0]
    if not bool(torch.isfinite(row).all()):
        return "FAIL"
    if cached_length == LENGTH - 8:
        return "rotated"
    cold = family.alone((*family.prompt[:4], *family.prompt[12:], 7))
    return "recomputed" if family.agrees(cold, row) else "FAIL"


def rotated(name: str) -> str:
    """Whether texts beyond the original length, or across it, get the logits of `generate` alone.

    n/a: the family has no factors that depend on the length.
    """
    own = build_longrope(name)
    if own is None:
        return "n/a"
    return "PASS" if all(_generates(own, start) for start in (ORIGINAL - 3, ORIGINAL + 2)) else "FAIL"


def build_longrope(name: str) -> Family | None:
    """The model of a family with LongRoPE in all rotary layers; None: it does not support LongRoPE."""
    config = AutoConfig.for_model(name, **settings(name))
    known = getattr(config, "rope_parameters", None)
    if not known:
        return None
    with torch.device("meta"):
        modules = list(AutoModelForCausalLM.from_config(config).modules())
    rotary = next((module for module in modules if hasattr(module, "rope_type")), None)
    if rotary is None:
        return None
    if isinstance(rotary.rope_type, dict):
        parameters = {kind: _longrope(known[kind], getattr(rotary, f"{kind}_inv_freq")) for kind in rotary.rope_type}
    else:
        parameters = _longrope(known, rotary.inv_freq)
    own = {"original_max_position_embeddings": ORIGINAL} if hasattr(config, "original_max_position_embeddings") else {}
    own["rope_parameters"] = parameters
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**settings(name), **own}))
    except (AttributeError, KeyError, RuntimeError, ValueError):
        return None
    return build(name, **own)


def _longrope(known: dict[str, Any], frequencies: Tensor) -> dict[str, Any]:
    pairs = len(frequencies)
    return {
        "rope_theta": 10000.0,
        **known,
        "rope_type": "longrope",
        "short_factor": [1.0 + at / pairs for at in range(pairs)],
        "long_factor": [1.0 + 8.0 * at / pairs for at in range(pairs)],
        "short_mscale": 1.1,
        "long_mscale": 1.3,
        "original_max_position_embeddings": ORIGINAL,
    }


def _generates(family: Family, start: int) -> bool:
    """Whether the tokens that `generate` appends to a prompt of `start` tokens get the same logits here."""
    prompt = torch.tensor([(*family.prompt, *family.prompt)[:start]])
    attention = family.model.config._attn_implementation
    family.model.set_attn_implementation("eager")
    with torch.inference_mode(), StableTopK():
        generated = family.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=DynamicCache() if _has_idle_window(family) else None,
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    family.model.set_attn_implementation(attention)
    rows = _replayed(family, generated.sequences[0].tolist(), start)
    return all(family.agrees(expected[0], row) for expected, row in zip(generated.logits, rows, strict=True))


def _has_idle_window(family: Family) -> bool:
    """Whether the configuration has a window that no layer uses: transformers' cache would drop keys anyway."""
    named = getattr(family.model.config.get_text_config(), "sliding_window", None) is not None
    return named and all(plan.spec.attention_range.kind == "full" for plan in family.runner.layers)


def _replayed(family: Family, tokens: list[int], start: int) -> Iterator[Tensor]:
    """The logits after each token from `start` on, in a batch with a short sequence; recomputed if the factors require
    it.
    """
    cache, switch = family.cache(), family.runner.switch
    assert switch is not None
    long_factors = start > switch.original_length
    for length in range(start, len(tokens)):
        if switch.recomputes and not long_factors and length > switch.original_length:
            long_factors = True
            cache.clear(0)
        spans = [
            Span(0, cache.cached_length(0), length - cache.cached_length(0), long_factors=long_factors),
            Span(1, cache.cached_length(1), 1),
        ]
        own = [*tokens[spans[0].start : length], 7]
        with cache.forward(spans) as forward:
            yield family.runner.run(StepInput(forward, own, [spans[0].length - 1])).logits[0]


CHECKS: dict[str, Callable[[Family], bool]] = {
    "batched": batched,
    "chunked": chunked,
    "copy_prefix": copied,
    "prefix hit at every position": resumed,
    "prefix hit after trimming": trimmed,
    "restart from disk": restarted,
    "draft verification": verified,
}


def row(name: str) -> list[str]:
    """One row of the table."""
    family = build(name)
    kinds = {plan.spec.attention_range.kind for plan in family.runner.layers} | (
        {"recurrent"} if family.recurrent else set()
    )
    kinds |= {"latent"} if any(plan.spec.value_width == 0 for plan in family.runner.layers) else set()
    results = ["PASS" if check(family) else "FAIL" for check in CHECKS.values()]
    attention = "packed" if isinstance(family.runner, PackedRunner) else "sequential"
    return [name, ", ".join(sorted(kinds)), attention, *results, shifted(family), rotated(name)]


def table() -> Iterator[str]:
    """The lines of the table."""
    heads = ["family", "layers", "runner", *CHECKS, "shift", "LongRoPE"]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for name in sorted(FAMILIES):
        yield f"| {' | '.join(row(name))} |"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for line in table():
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
