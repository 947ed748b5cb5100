"""One check at load: what the model says in a packed, chunked batch must be what it says alone.

transformers changes often, and a model may compute positions or masks in a way that packing breaks. Such a model runs
one sequence at a time (engine/gathering.py); if that is not right either, it is refused here, in words, instead of
answering nonsense later.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine import hooks
from engine.encoding import Encoder
from engine.errors import ModelUnsupported
from engine.gathering import GatheringRunner
from engine.plan import plan_layers
from engine.runner import Runner
from engine.sight import Sight
from engine.types import MlaMode
from kvcache.cache import Cache
from kvcache.spec import Span

log = logging.getLogger("cellar.engine")

# Two sequences, cut so that a continued prompt, a new prompt and a single row meet in one forward.
_LENGTHS = (9, 8)
_STEPS = (((0, 4),), ((0, 4), (1, 7)), ((0, 1), (1, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a model before it runs.

    recurrent  whether some of its layers keep a state
    dtype      in which it computes
    stored     in which its keys and values are kept; None: the same
    """

    vocabulary: int
    recurrent: bool
    dtype: torch.dtype
    stored: torch.dtype | None = None
    mla: MlaMode = "auto"
    encoder: Encoder | None = None


@dataclass(frozen=True, slots=True)
class _Case:
    """A sequence to be compared: its prompt, what the model takes to read it alone, and what its rows see of media."""

    prompt: list[int]
    inputs: Mapping[str, Tensor]
    sight: Sight | None = None


def find_runner(name: str, model: Any, facts: Facts) -> Runner | GatheringRunner:
    """The fastest way to run the model over cells that says what the model says alone. Raises ModelUnsupported.

    The model's hooks (engine/hooks.py, engine/recurrence.py) must be in place; it is left as its runner needs it.
    """
    try:
        model.set_attn_implementation(_plain(model))
        cases = [_case(model, facts, number) for number in range(len(_LENGTHS))]
        alone = [_alone(model, case) for case in cases]
    except Exception as error:
        raise ModelUnsupported(name, f"it does not run ({type(error).__name__}: {error})") from error
    reason = None
    for make in (_packed, _gathering):
        try:
            runner = make(model, facts)
            _compare(alone, _played(runner, model, cases, facts, facts.dtype), facts.dtype)
        except Exception as error:
            reason = reason or f"{type(error).__name__}: {error}"
            continue
        if reason is not None:
            log.warning("%s runs one sequence at a time, for packed batches change it (%s)", name, reason)
        stored = facts.stored or facts.dtype
        if not all(row.isfinite().all() for row in _played(runner, model, cases, facts, stored)):
            raise ModelUnsupported(name, f"its keys or values do not fit into {stored}; choose another --kv-dtype")
        return runner
    raise ModelUnsupported(name, f"it cannot run in packed batches ({reason})")


class _Differs(Exception):
    """A batch changed what a sequence gets to hear."""


def _packed(model: Any, facts: Facts) -> Runner:
    model.set_attn_implementation(hooks.NAME)
    layers = plan_layers(model, vocabulary=facts.vocabulary)
    if not layers and not facts.recurrent:
        raise _Differs("its layers mix along the sequence in no way that can be packed")
    return Runner(model, layers, facts.mla)


def _gathering(model: Any, facts: Facts) -> GatheringRunner:
    model.set_attn_implementation(_plain(model))
    return GatheringRunner(model)


def _compare(alone: list[Tensor], batched: list[Tensor], dtype: torch.dtype) -> None:
    for expected, actual in zip(alone, batched, strict=True):
        size = float((expected - actual).abs().max())
        allowed = _tolerance(dtype) * max(1.0, float(expected.abs().max()))
        if not size <= allowed:
            raise _Differs(f"its logits differ by {size:.2g}, where {allowed:.2g} is rounding")


def _plain(model: Any) -> str:
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def _prompt(vocabulary: int, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (length,), generator=generator).tolist()


def _case(model: Any, facts: Facts, number: int) -> _Case:
    """The first sequence looks at media if any can; the others do where the model says nothing without."""
    prompt, encoder = _prompt(facts.vocabulary, _LENGTHS[number], number), facts.encoder
    if encoder is None or (number > 0 and not encoder.needed):
        return _Case(prompt, {"input_ids": torch.tensor([prompt], device=next(model.parameters()).device)})
    prompt, media = encoder.sample_prompt(prompt), encoder.sample()
    return _Case(prompt, encoder.alone(media, prompt), encoder.sight(encoder.encode(media), media, prompt))


def _alone(model: Any, case: _Case) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(**case.inputs, use_cache=False).logits
    return logits[0, -1]


def _played(
    runner: Runner | GatheringRunner, model: Any, cases: list[_Case], facts: Facts, stored: torch.dtype
) -> list[Tensor]:
    """The logits after each prompt, computed in the steps of `_STEPS`."""
    device = next(model.parameters()).device
    specs = [plan.spec for plan in runner.layers]
    state_bytes = 0 if facts.recurrent else None
    cache = Cache(specs, slots=2, capacity=16, cells=32, state_bytes=state_bytes, dtype=stored, device=device)
    logits = torch.empty(0)
    for step in _STEPS:
        spans = [Span(slot, cache.length(slot), length) for slot, length in step]
        tokens = [token for span in spans for token in cases[span.slot].prompt[span.start : span.stop]]
        wanted = torch.tensor([span.length for span in spans]).cumsum(0) - 1
        with cache.forward(spans) as forward:
            logits = runner.run(forward, tokens, wanted.tolist(), [cases[span.slot].sight for span in spans])
    return list(logits)


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 6e-2)
