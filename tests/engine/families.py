"""One tiny random model a family, and what has to hold for it: rows of the table in docs/models.md.

`python -m tests.engine.families` runs every check on every family and prints the table (minutes).
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

from engine.load.selftest import ModelTraits, find_runner
from engine.model import hooks, recurrence, rope
from engine.model.runner import PackedRunner
from engine.model.sequential_runner import SequentialRunner
from engine.model.ties import StableTopK
from kvcache.cache import Cache
from kvcache.offload import OffloadConfig
from kvcache.spec import Span
from tests.engine.tiny import FAMILIES, VOCABULARY, settings

LENGTH = 24
# Where rotary factors change: behind the positions by which a model is planned.
ORIGINAL = 32


@dataclass(frozen=True, slots=True)
class Family:
    """A tiny model of one family, ready to run over cells, and the prompt that it is checked with."""

    name: str
    model: Any
    runner: PackedRunner | SequentialRunner
    recurrent: bool
    prompt: tuple[int, ...]

    def cache(self, shelf: OffloadConfig | None = None) -> Cache:
        """An empty cache for it, but for what the shelf holds."""
        specs = [plan.spec for plan in self.runner.layers]
        state_bytes = 2**30 if self.recurrent else None
        return Cache(specs, slots=4, capacity=2 * LENGTH, cells=8 * LENGTH, state_bytes=state_bytes, offload=shelf)

    def feed(self, cache: Cache, *parts: tuple[int, tuple[int, ...]]) -> list[Tensor]:
        """One forward that appends (slot, tokens) parts; the logits after each."""
        spans = [Span(slot, cache.cached_length(slot), len(tokens)) for slot, tokens in parts]
        tokens = [token for _, tokens in parts for token in tokens]
        wanted = torch.tensor([span.length for span in spans]).cumsum(0) - 1
        with cache.forward(spans) as forward:
            return list(self.runner.run(forward, tokens, wanted.tolist()))

    def alone(self, tokens: tuple[int, ...]) -> Tensor:
        """The logits after some tokens, by transformers without us; equal scores are selected in order."""
        way = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        with torch.inference_mode(), StableTopK():
            logits: Tensor = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        self.model.set_attn_implementation(way)
        return logits

    def goes_on(self, cache: Cache, length: int) -> bool:
        """Whether a prompt that leaves the family's after `length` tokens gets the logits of a cold start."""
        prompt = (*self.prompt[:length], 258, 259)
        standing = cache.reuse_prefix(1, prompt[:-1])
        right = self.agrees(self.alone(prompt), self.feed(cache, (1, prompt[standing:]))[0])
        cache.clear(1)
        return right

    def agrees(self, expected: Tensor, actual: Tensor) -> bool:
        """Whether two rows of logits are the same but for rounding."""
        return float((expected - actual).abs().max()) <= 1e-3 * max(1.0, float(expected.abs().max()))


def build(name: str, **own: Any) -> Family:
    """The model of a family, some settings changed. Raises what transformers raises where it cannot be run packed."""
    # Tiny layers: a second thread would only be waited for (measured 10 times slower on busy cores).
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**settings(name), **own})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    plant(model)
    switch, recurrent = rope.install(model), recurrence.install(model)
    hooks.install_latent(model)
    generator = torch.Generator().manual_seed(1)
    prompt = tuple(torch.randint(3, VOCABULARY, (LENGTH,), generator=generator).tolist())
    facts = ModelTraits(vocabulary=VOCABULARY, recurrent=recurrent, dtype=torch.float32, switch=switch)
    return Family(name, model, find_runner(name, model, facts), recurrent, prompt)


def plant(model: Any) -> None:
    """Let what scales a dynamic mask (Doge) tell positions apart: it begins as zeros, where all are equally likely."""
    for name, parameter in model.named_parameters():
        if name.endswith("self_attn.A"):
            torch.nn.init.normal_(parameter)


def batched(family: Family) -> bool:
    """Three sequences in one forward get the logits that each gets alone."""
    cache, prompt = family.cache(), family.prompt
    parts = ((0, prompt), (1, prompt[3:]), (2, prompt[9:12]))
    packed = family.feed(cache, *parts)
    return all(family.agrees(family.alone(tokens), row) for (_, tokens), row in zip(parts, packed, strict=True))


def chunked(family: Family) -> bool:
    """A prompt in chunks of 1 and 5, beside a neighbour, gets the logits of one forward."""
    expected = family.alone(family.prompt)
    for size in (1, 5):
        cache, row = family.cache(), expected
        for at in range(0, LENGTH, size):
            row = family.feed(cache, (2, family.prompt[at : at + size]), (3, family.prompt[:1]))[0]
        if not family.agrees(expected, row):
            return False
    return True


def copied(family: Family) -> bool:
    """copy_prefix from a running slot, at every length: the rest computed gives the logits of a cold start."""
    expected = family.alone(family.prompt)
    cache = family.cache()
    for at in range(0, LENGTH, 6):
        family.feed(cache, (0, family.prompt[at : at + 6]))
    for length in range(LENGTH):
        standing = cache.copy_prefix(0, 1, length)
        if standing > length or not family.agrees(expected, family.feed(cache, (1, family.prompt[standing:]))[0]):
            return False
    return True


def resumed(family: Family) -> bool:
    """A prompt that leaves a remembered one at any position gets the logits of a cold start."""
    cache = family.cache()
    for at in range(0, LENGTH, 6):
        family.feed(cache, (0, family.prompt[at : at + 6]))
        cache.insert_prefix(0, family.prompt[: at + 6])
    cache.clear(0)
    return all(family.goes_on(cache, length) for length in range(1, LENGTH))


def thinned(family: Family) -> bool:
    """As above when memory is short: what going on at the end of a prompt does not need is gone."""
    cache = family.cache()
    family.feed(cache, (0, family.prompt[:8]))
    cache.insert_prefix(0, family.prompt[:8], checkpoint=True)
    family.feed(cache, (0, family.prompt[8:]))
    cache.insert_prefix(0, family.prompt)
    cache.clear(0)
    cache.evict(LENGTH // 2)
    return all(family.goes_on(cache, length) for length in range(1, LENGTH))


def restarted(family: Family) -> bool:
    """As above in the next process, with what the last one wrote to files."""
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
        return found == LENGTH and all(family.goes_on(again, length) for length in range(1, LENGTH))


def speculated(family: Family) -> bool:
    """Of three guesses the first ones are right: their logits are those of a cold start, and so is what follows."""
    start, known = 10, 12
    for right in range(4):
        cache = family.cache()
        family.feed(cache, (0, family.prompt[:start]))
        guesses = (*family.prompt[known : known + right], 258, 258, 258)[:3]
        with cache.forward([Span(0, start, known - start + 3, draft_tokens=3)]) as forward:
            rows = family.runner.run(forward, (*family.prompt[start:known], *guesses), [1, 2, 3, 4])
            forward.keep(0, known + right)
        verified = (
            family.agrees(family.alone(family.prompt[: known + at]), row) for at, row in enumerate(rows[: right + 1])
        )
        rest = family.feed(cache, (0, family.prompt[cache.cached_length(0) :]))[0]
        if not (all(verified) and family.agrees(family.alone(family.prompt), rest)):
            return False
    return True


def shifted(family: Family) -> str:
    """How the context shifts: keys turned, or computed anew; either way the slot stands at most where it was asked."""
    cache = family.cache()
    family.feed(cache, (0, family.prompt))
    standing = cache.shift(0, 4, 8)
    rest = (*family.prompt[:4], *family.prompt[12:])[standing:]
    row = family.feed(cache, (0, (*rest, 7)))[0]
    if not bool(torch.isfinite(row).all()):
        return "FAIL"
    if standing == LENGTH - 8:
        return "turned"
    cold = family.alone((*family.prompt[:4], *family.prompt[12:], 7))
    return "recomputed" if family.agrees(cold, row) else "FAIL"


def rotated(name: str) -> str:
    """Whether texts that begin beyond the original length, or cross it, get the logits that `generate` alone computes.

    n/a: the family knows no factors that depend on the length.
    """
    own = build_longrope(name)
    if own is None:
        return "n/a"
    return "PASS" if all(_generates(own, start) for start in (ORIGINAL - 3, ORIGINAL + 2)) else "FAIL"


def build_longrope(name: str) -> Family | None:
    """The model of a family with LongRoPE in all layers that rotate; None: it has no such kind."""
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
    way = family.model.config._attn_implementation
    family.model.set_attn_implementation("eager")
    with torch.inference_mode(), StableTopK():
        said = family.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=DynamicCache() if _has_idle_window(family) else None,
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    family.model.set_attn_implementation(way)
    rows = _replayed(family, said.sequences[0].tolist(), start)
    return all(family.agrees(expected[0], row) for expected, row in zip(said.logits, rows, strict=True))


def _has_idle_window(family: Family) -> bool:
    """Whether the configuration names a window that no layer has: transformers' cache would drop keys all the same."""
    named = getattr(family.model.config.get_text_config(), "sliding_window", None) is not None
    return named and all(plan.spec.attention_range.kind == "full" for plan in family.runner.layers)


def _replayed(family: Family, tokens: list[int], start: int) -> Iterator[Tensor]:
    """The logits after each token from `start` on, beside a short neighbour; a restarted sequence is computed anew."""
    cache, switch = family.cache(), family.runner.switch
    assert switch is not None
    extended = start > switch.original_length
    for length in range(start, len(tokens)):
        if switch.recomputes and not extended and length > switch.original_length:
            extended = True
            cache.clear(0)
        spans = [
            Span(0, cache.cached_length(0), length - cache.cached_length(0), long_factors=extended),
            Span(1, cache.cached_length(1), 1),
        ]
        own = [*tokens[spans[0].start : length], 7]
        with cache.forward(spans) as forward:
            yield family.runner.run(forward, own, [spans[0].length - 1])[0]


CHECKS: dict[str, Callable[[Family], bool]] = {
    "batched": batched,
    "chunked": chunked,
    "copy_prefix": copied,
    "tree resume at every position": resumed,
    "tree resume, thinned": thinned,
    "restart from disk": restarted,
    "speculation seam": speculated,
}


def row(name: str) -> list[str]:
    """One row of the table."""
    family = build(name)
    kinds = {plan.spec.attention_range.kind for plan in family.runner.layers} | (
        {"recurrent"} if family.recurrent else set()
    )
    kinds |= {"latent"} if any(plan.spec.value_width == 0 for plan in family.runner.layers) else set()
    results = ["PASS" if check(family) else "FAIL" for check in CHECKS.values()]
    way = "packed" if isinstance(family.runner, PackedRunner) else "one by one"
    return [name, ", ".join(sorted(kinds)), way, *results, shifted(family), rotated(name)]


def table() -> Iterator[str]:
    """The table, line by line."""
    heads = ["family", "memory", "sequences", *CHECKS, "shift", "rotation beyond the original length"]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for name in sorted(FAMILIES):
        yield f"| {' | '.join(row(name))} |"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for line in table():
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
