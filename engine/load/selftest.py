"""Compares the logits of packed, chunked batches with the logits of the model alone, at load.

transformers changes often, and a model may compute positions or masks in a way that packing breaks. Such a model runs
one sequence at a time (sequential_runner.py); if its logits differ there too, it is refused.

The prompt is longer than twice the attention range of layers (a window, a chunk, a top-k selection) if the
model is small enough, so that an error in a mask changes the logits; see `_MAX_WEIGHT_TOKENS`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from engine.errors import ModelUnsupported
from engine.kernels import reference
from engine.kernels.reference import AttentionFunction
from engine.model import hooks, rope
from engine.model.encoder import Encoder
from engine.model.encoder_mask import EncoderMask
from engine.model.invariant import StableTopK
from engine.model.layers import CachedLayer, find_cached_layers
from engine.model.margins import within
from engine.model.model_runner import ModelRunner
from engine.model.rope import RopeSwitch
from engine.model.runner import PackedRunner
from engine.model.sequential_runner import SequentialRunner
from engine.native.float32_mode import Float32Mode
from engine.types.request import MlaMode
from kvcache.cache import Cache
from kvcache.spec import Span

log = logging.getLogger("cellar.engine")

# Configuration fields with the number of positions that a layer attends to.
_RANGE_FIELDS = ("sliding_window", "attention_chunk_size", "index_topk", "window_size", "keep_window_size")
# Tokens of the shortest and the longest prompt.
_MIN_PROMPT, _MAX_PROMPT = 9, 1024
# Most weights times prompt tokens: the whole check then takes 2 s on one core (measured).
_MAX_WEIGHT_TOKENS = 5 * 10**10
# Tokens of the prompts of `is_batch_invariant`: more than a tile of rows in a matrix product.
_INVARIANCE_PROMPT = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """Properties of a model that are known before it runs.

    recurrent  whether some layers keep a recurrent state
    dtype      of its weights and activations
    kv_dtype   of cached keys and values; None: the same
    attend     the preferred attention kernel
    switch     the length at which its rotary factors change: the checks run with both; None: never
    """

    vocabulary: int
    recurrent: bool
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    mla: MlaMode = "auto"
    attend: AttentionFunction = reference.attend
    encoder: Encoder | None = None
    switch: RopeSwitch | None = None


@dataclass(frozen=True, slots=True)
class _TestSequence:
    """A sequence of the check: its prompt, the inputs of the unmodified model, and its encoder mask."""

    prompt: list[int]
    inputs: Mapping[str, Tensor]
    encoder_mask: EncoderMask | None = None


def find_runner(name: str, model: Any, traits: ModelTraits) -> ModelRunner:
    """The fastest runner with the logits of the unmodified model. Raises ModelUnsupported.

    The model's hooks (hooks.py, recurrence.py) must be installed; the attention implementation of the model is set for
    the runner.
    """
    try:
        model.set_attn_implementation(_default_attention(model))
        sequences = [_test_sequence(model, traits, number) for number in range(2)]
        expected_logits = _expected_logits(model, sequences, traits)
    except Exception as error:
        raise ModelUnsupported(name, f"it does not run ({type(error).__name__}: {error})") from error
    reasons: list[str] = []
    for warning, make_runner in _candidates(traits):
        try:
            runner = make_runner(model)
            with hooks.watch_output_layer(model) as was_called:
                _check(expected_logits, runner, model, sequences, traits)
            runner.has_hidden_states = was_called()
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        if reasons:
            log.warning("%s %s (%s)", name, warning, reasons[0])
        _check_kv_dtype(name, model, runner, sequences, traits)
        return runner
    packed, *_, sequential = reasons
    raise ModelUnsupported(
        name, f"it cannot run in packed batches ({packed}), nor one sequence at a time ({sequential})"
    )


def restore_runner(
    model: Any, traits: ModelTraits, layers: Sequence[CachedLayer], *, has_hidden_states: bool
) -> PackedRunner:
    """The packed runner that an earlier `find_runner` found, without another check."""
    model.set_attn_implementation(hooks.ATTENTION_NAME)
    runner = _packed_runner(model, traits, layers)
    runner.has_hidden_states = has_hidden_states
    return runner


def _check_kv_dtype(
    name: str, model: Any, runner: ModelRunner, sequences: list[_TestSequence], traits: ModelTraits
) -> None:
    kv_dtype = traits.kv_dtype or traits.dtype
    if kv_dtype == traits.dtype:
        return
    if not all(row.isfinite().all() for row in _batched_logits(runner, model, sequences, traits, kv_dtype)):
        raise ModelUnsupported(name, f"its keys or values do not fit into {kv_dtype}; choose another --kv-dtype")


def logit_difference(
    expected_runner: ModelRunner, actual_runner: ModelRunner, model: Any, traits: ModelTraits, kv_dtype: torch.dtype
) -> float:
    """The largest difference between the logits of two runners in the batches of the check, relative to the largest
    logit.

    kv_dtype  of cached keys and values during the check
    """
    sequences = [_test_sequence(model, traits, number) for number in range(2)]
    expected, actual = (
        torch.cat(_batched_logits(runner, model, sequences, traits, kv_dtype))
        for runner in (expected_runner, actual_runner)
    )
    return float((expected - actual).abs().max() / expected.abs().max().clamp_min(1.0))


def is_batch_invariant(runner: ModelRunner, model: Any, traits: ModelTraits) -> bool:
    """Whether two prompts, in chunks and in one batch, have bit for bit the logits that each has alone in one chunk."""
    sequences = [_test_sequence(model, traits, number, _INVARIANCE_PROMPT) for number in (1, 2)]
    first, second = (len(sequence.prompt) for sequence in sequences)
    steps = ((0, 7),), ((0, 1), (1, second - 8)), ((0, first - 9), (1, 7)), ((0, 1), (1, 1))
    batched = _all_logits(runner, model, sequences, traits, steps)
    expected_logits = [
        _all_logits(runner, model, [sequence], traits, (((0, len(sequence.prompt)),),))[0] for sequence in sequences
    ]
    return all(map(torch.equal, expected_logits, batched))


def _all_logits(
    runner: ModelRunner,
    model: Any,
    sequences: list[_TestSequence],
    traits: ModelTraits,
    steps: _StepPlan,
) -> list[Tensor]:
    """The logits [prompt, vocabulary] of each sequence."""
    cache = _cache(runner, model, sequences, traits, traits.kv_dtype or traits.dtype)
    logits_by_slot: list[list[Tensor]] = [[] for _ in sequences]
    for step in steps:
        spans, tokens, encoder_masks = _batch(cache, sequences, step)
        with cache.forward(spans) as forward:
            logits = runner.run(forward, tokens, list(range(len(tokens))), encoder_masks)
        for span, rows in zip(spans, torch.split(logits, [span.length for span in spans]), strict=True):
            logits_by_slot[span.slot].append(rows)
    return [torch.cat(rows) for rows in logits_by_slot]


class LogitsDiffer(Exception):
    """Logits of a batch differ from the logits of the model alone."""


# By forward, (sequence, number of tokens) pairs.
_StepPlan: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
_MakeRunner: TypeAlias = Callable[[Any], ModelRunner]


def _candidates(traits: ModelTraits) -> Iterator[tuple[str, _MakeRunner]]:
    """Ways to run the model, fastest first, each with the warning to log if all before it failed."""
    yield "", lambda model: _calibrated_runner(model, traits)
    if traits.attend is not reference.attend:
        torch_traits = replace(traits, attend=reference.attend)
        yield (
            "attends in torch operations, because the C++ kernel changes its logits",
            lambda model: _calibrated_runner(model, torch_traits),
        )
    yield (
        "runs one sequence at a time, because packed batches change its logits",
        lambda model: _sequential_runner(model, traits),
    )


def _calibrated_runner(model: Any, traits: ModelTraits) -> PackedRunner:
    model.set_attn_implementation(hooks.ATTENTION_NAME)
    layers = find_cached_layers(model, vocabulary=traits.vocabulary)
    if not layers and not traits.recurrent:
        raise LogitsDiffer("its layers mix tokens by unknown operations")
    return _packed_runner(model, traits, layers)


def _packed_runner(model: Any, traits: ModelTraits, layers: Sequence[CachedLayer]) -> PackedRunner:
    """A packed runner; with two kinds of rotary factors, the layers beyond the original length are calibrated too."""
    extended = None
    if traits.switch is not None:
        with rope.extending():
            extended = find_cached_layers(model, vocabulary=traits.vocabulary)
    return PackedRunner(model, layers, traits.mla, traits.attend, switch=traits.switch, extended_layers=extended)


def _sequential_runner(model: Any, traits: ModelTraits) -> SequentialRunner:
    model.set_attn_implementation(_default_attention(model))
    return SequentialRunner(model, traits.switch)


def _check(
    expected_logits: list[Tensor],
    runner: ModelRunner,
    model: Any,
    sequences: list[_TestSequence],
    traits: ModelTraits,
) -> None:
    """Raise LogitsDiffer unless the runner's logits agree with the logits of the model alone."""
    try:
        batched = _batched_logits(runner, model, sequences, traits, traits.dtype)
        _compare(expected_logits, batched, traits.dtype)
    except LogitsDiffer as error:
        if traits.dtype == torch.float64:
            # transformers computes norms, routers and recurrences in float32 whatever the dtype of the weights is.
            _compare(expected_logits, batched, torch.float32)
            log.info("parts of the model are computed in float32: %s", error)
            return
        # In bfloat16, rounding alone makes routers choose other experts: the check is repeated in float32.
        if traits.dtype != torch.bfloat16:
            raise
        attention = model.config._attn_implementation
        with Float32Mode(model):
            model.set_attn_implementation(_default_attention(model))
            expected_logits = _expected_logits(model, sequences, traits)
            model.set_attn_implementation(attention)
            _compare(expected_logits, _batched_logits(runner, model, sequences, traits, torch.float32), torch.float32)


def _compare(expected_logits: list[Tensor], batched: list[Tensor], dtype: torch.dtype) -> None:
    for expected, actual in zip(expected_logits, batched, strict=True):
        error, allowed = _error(expected, actual), _tolerance(dtype)
        if not within(f"batched logits are those alone, {dtype}", error, allowed):
            raise LogitsDiffer(f"its logits differ by {error:.2g}, where {allowed:.2g} is rounding")


def _error(expected: Tensor, actual: Tensor) -> float:
    """Largest root-mean-square error of a row of logits, relative to the row's standard deviation.

    A few outliers among the logits, such as unused tokens, hide no error of the others.
    """
    exact = expected.double()
    error = (exact - actual).square().mean(-1).sqrt()
    # Rounding is relative to the logits: rows of nearly equal logits have no less of it.
    deviation = torch.maximum(exact.std(-1, correction=0), 1e-2 * exact.abs().amax(-1)).clamp_min(1e-6)
    return float((error / deviation).max())


def _default_attention(model: Any) -> str:
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def _prompt_length(model: Any, switch: RopeSwitch | None = None) -> int:
    """Tokens of the longer prompt: beyond twice the longest affordable range, within the original length."""
    config = model.config.get_text_config()
    weights = sum(parameter.numel() for parameter in model.parameters())
    limit = min(
        _MAX_PROMPT, _MAX_WEIGHT_TOKENS // weights, getattr(config, "max_position_embeddings", None) or _MAX_PROMPT
    )
    limit = limit if switch is None else min(limit, switch.original_length)
    sizes = [size for name in _RANGE_FIELDS if isinstance(size := getattr(config, name, None), int)]
    return _MIN_PROMPT + max((2 * size for size in sizes if 2 * size + _MIN_PROMPT <= limit), default=0)


def _steps(length: int) -> _StepPlan:
    """Steps in which a continued prompt, a new prompt and single tokens share batches."""
    first = (length - 5) // 2
    return ((0, 4),), ((0, first), (1, 7)), ((0, length - 5 - first), (1, 1)), ((0, 1), (1, 1))


def _span_ends(steps: _StepPlan, number: int) -> list[int]:
    """Positions where the spans of a sequence end."""
    return list(accumulate(tokens for step in steps for slot, tokens in step if slot == number))


def _prompt(vocabulary: int, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (length,), generator=generator).tolist()


def _test_sequence(model: Any, traits: ModelTraits, number: int, length: int | None = None) -> _TestSequence:
    """A random prompt; the first sequence has media if the model has an encoder, the others if it requires media."""
    length = length or (_MIN_PROMPT if number > 0 else _prompt_length(model, traits.switch))
    prompt, encoder = _prompt(traits.vocabulary, length, number), traits.encoder
    if encoder is None or (number > 0 and not encoder.required):
        return _TestSequence(prompt, {"input_ids": torch.tensor([prompt], device=next(model.parameters()).device)})
    prompt, media = encoder.sample_prompt(prompt), encoder.sample()
    return _TestSequence(
        prompt, encoder.reference_inputs(media, prompt), encoder.mask(encoder.encode(media), media, prompt)
    )


def _rope_variants(traits: ModelTraits) -> tuple[bool, ...]:
    """The rotary factors to check: short ones, and long ones if there are any."""
    return (False,) if traits.switch is None else (False, True)


def _expected_logits(model: Any, sequences: list[_TestSequence], traits: ModelTraits) -> list[Tensor]:
    """The logits that `_batched_logits` should return, by the unmodified model."""
    steps, rows = _steps(len(sequences[0].prompt)), []
    for extended in _rope_variants(traits):
        with rope.extending() if extended else nullcontext():
            rows += [
                _logits_alone(model, sequence, _span_ends(steps, number)) for number, sequence in enumerate(sequences)
            ]
    return rows


def _logits_alone(model: Any, sequence: _TestSequence, ends: list[int]) -> Tensor:
    """The logits [ends, vocabulary] of the tokens before each end, by the unmodified model."""
    rows = torch.tensor(ends, device=next(model.parameters()).device) - 1
    known = inspect.signature(type(model).forward).parameters
    selection = {"logits_to_keep": rows} if "logits_to_keep" in known else {}
    with torch.inference_mode(), StableTopK():
        logits: Tensor = model(**sequence.inputs, **selection, use_cache=False).logits[0]
    # A model that ignores logits_to_keep returns every row.
    return logits if logits.shape[0] == len(ends) else logits[rows]


def _batched_logits(
    runner: ModelRunner,
    model: Any,
    sequences: list[_TestSequence],
    traits: ModelTraits,
    kv_dtype: torch.dtype,
) -> list[Tensor]:
    """For each kind of rotary factors and each sequence, the logits [ends, vocabulary] at the ends of its spans."""
    return [
        rows
        for extended in _rope_variants(traits)
        for rows in _batched_logits_once(runner, model, sequences, traits, kv_dtype, extended=extended)
    ]


def _batched_logits_once(
    runner: ModelRunner,
    model: Any,
    sequences: list[_TestSequence],
    traits: ModelTraits,
    kv_dtype: torch.dtype,
    *,
    extended: bool,
) -> list[Tensor]:
    cache = _cache(runner, model, sequences, traits, kv_dtype)
    logits_by_slot: list[list[Tensor]] = [[] for _ in sequences]
    for step in _steps(len(sequences[0].prompt)):
        spans, tokens, encoder_masks = _batch(cache, sequences, step, extended=extended)
        logit_rows = torch.tensor([span.length for span in spans]).cumsum(0) - 1
        with cache.forward(spans) as forward:
            logits = runner.run(forward, tokens, logit_rows.tolist(), encoder_masks)
        for span, row in zip(spans, logits, strict=True):
            logits_by_slot[span.slot].append(row)
    return [torch.stack(rows) for rows in logits_by_slot]


def _cache(
    runner: ModelRunner,
    model: Any,
    sequences: list[_TestSequence],
    traits: ModelTraits,
    kv_dtype: torch.dtype,
) -> Cache:
    """An empty cache with two slots."""
    device = next(model.parameters()).device
    specs = [layer.spec for layer in runner.layers]
    state_bytes = 0 if traits.recurrent else None
    length = max(len(sequence.prompt) for sequence in sequences)
    return Cache(
        specs, slots=2, capacity=length, cells=2 * length, state_bytes=state_bytes, dtype=kv_dtype, device=device
    )


def _batch(
    cache: Cache, sequences: list[_TestSequence], step: tuple[tuple[int, int], ...], *, extended: bool = False
) -> tuple[list[Span], list[int], list[EncoderMask | None]]:
    """The spans of a step, their tokens and their encoder masks."""
    spans = [Span(slot, cache.cached_length(slot), length, long_factors=extended) for slot, length in step]
    tokens = [token for span in spans for token in sequences[span.slot].prompt[span.start : span.stop]]
    return spans, tokens, [sequences[span.slot].encoder_mask for span in spans]


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 6e-2)
