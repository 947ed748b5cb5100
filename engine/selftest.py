"""One check at load: what the model says in a packed, chunked batch must be what it says alone.

transformers changes often, and a model may compute positions or masks in a way that packing breaks. Such a model is
refused here, in words, instead of answering nonsense later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine import hooks
from engine.errors import ModelUnsupported
from engine.plan import LayerPlan
from engine.runner import Runner
from kvcache.cache import Cache
from kvcache.spec import Span

# Two sequences, cut so that a continued prompt, a new prompt and a single row meet in one forward.
_LENGTHS = (9, 8)
_STEPS = (((0, 4),), ((0, 4), (1, 7)), ((0, 1), (1, 1)))


def check_packing(name: str, model: Any, layers: Sequence[LayerPlan], *, vocabulary: int, dtype: torch.dtype) -> None:
    """Raises ModelUnsupported if a packed batch changes what a sequence gets to hear. Leaves the model packed."""
    prompts = [_prompt(vocabulary, length, seed) for seed, length in enumerate(_LENGTHS)]
    try:
        model.set_attn_implementation(_plain(model))
        alone = [_alone(model, prompt) for prompt in prompts]
        model.set_attn_implementation(hooks.NAME)
        packed = _packed(model, layers, prompts, dtype)
    except Exception as error:
        raise ModelUnsupported(name, f"its self-test failed ({type(error).__name__}: {error})") from error
    for expected, actual in zip(alone, packed, strict=True):
        error_size = float((expected - actual).abs().max())
        allowed = _tolerance(dtype) * max(1.0, float(expected.abs().max()))
        if not error_size <= allowed:
            reason = f"packed batches change its logits by {error_size:.2g}, where {allowed:.2g} is rounding"
            raise ModelUnsupported(name, reason)


def _plain(model: Any) -> str:
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def _prompt(vocabulary: int, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (length,), generator=generator).tolist()


def _alone(model: Any, prompt: list[int]) -> Tensor:
    device = next(model.parameters()).device
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([prompt], device=device), use_cache=False).logits
    return logits[0, -1]


def _packed(model: Any, layers: Sequence[LayerPlan], prompts: list[list[int]], dtype: torch.dtype) -> list[Tensor]:
    device = next(model.parameters()).device
    specs = [plan.spec for plan in layers]
    cache = Cache(specs, slots=len(prompts), capacity=16, cells=32, state_bytes=0, dtype=dtype, device=device)
    runner = Runner(model, layers)
    logits = torch.empty(0)
    for step in _STEPS:
        spans = [Span(slot, cache.length(slot), length) for slot, length in step]
        tokens = [token for span in spans for token in prompts[span.slot][span.start : span.stop]]
        wanted = torch.tensor([span.length for span in spans]).cumsum(0) - 1
        with cache.forward(spans) as forward:
            logits = runner.run(forward, tokens, wanted.tolist())
    return list(logits)


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 6e-2)
