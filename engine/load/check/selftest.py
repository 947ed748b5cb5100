"""Compares the logits of packed, chunked batches with the logits of the model alone, at load.

transformers changes often, and a model may compute positions or masks in a way that packing breaks. Such a model runs
one sequence at a time (engine/run/sequential.py); if its logits differ there too, it is refused.

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
from engine.kernels.attention_input import AttentionFunction
from engine.media.encoder import CapturingEncoder
from engine.media.sample_prompt import SamplePrompt, batch_contents
from engine.model import hooks, rope
from engine.model.encoder import Encoder
from engine.model.invariant import StableTopK, UnreplacedOperations
from engine.model.layers import CachedLayer, find_cached_layers
from engine.model.margins import within
from engine.model.rope import RopeSwitch
from engine.native.float32_mode import Float32Mode
from engine.quantize.quantize import weights_of
from engine.run.device import DeviceRunner
from engine.run.graphs import GraphRunner, recorder_for
from engine.run.packed import PackedRunner
from engine.run.runner import ModelRunner
from engine.run.sequential import SequentialRunner
from engine.step.encoder_mask import EncoderMask
from engine.step.input import StepInput
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
# Tokens of the prompts of `batch_dependence`: more than a tile of rows in a matrix product.
_INVARIANCE_PROMPT = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """Properties of a model that are known before it runs.

    recurrent  whether some layers keep a recurrent state
    dtype      of its weights and activations
    kv_dtype   of cached keys and values; None: the same
    attend     the preferred attention kernel
    switch     the length at which its rotary factors change: the checks run with both; None: never
    records    whether decoding steps may be recorded, on a GPU
    """

    vocabulary: int
    recurrent: bool
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    mla: MlaMode = "auto"
    attend: AttentionFunction = reference.attend
    encoder: Encoder | None = None
    contents: CapturingEncoder | None = None
    switch: RopeSwitch | None = None
    records: bool = True


@dataclass(frozen=True, slots=True)
class _TestSequence:
    """A sequence of the check: its prompt, the inputs of the unmodified model, and its encoder mask or content."""

    prompt: list[int]
    inputs: Mapping[str, Tensor]
    encoder_mask: EncoderMask | None = None
    content: SamplePrompt | None = None


# By forward, (sequence, number of tokens) pairs.
_StepPlan: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]


def find_runner(name: str, model: Any, traits: ModelTraits) -> PackedRunner | SequentialRunner:
    """The fastest runner with the logits of the unmodified model. Raises ModelUnsupported.

    The model's hooks (hooks.py, recurrence.py) must be installed; the attention implementation of the model is set for
    the runner.
    """
    try:
        hooks.set_attention(model, hooks.default_attention(model))
        batches = _CheckBatches(model, traits, [_test_sequence(model, traits, number) for number in range(2)])
        checks = [(batch.expected_logits(), batch) for batch in (batches, *_content_batches(model, traits))]
    except Exception as error:
        raise ModelUnsupported(name, f"it does not run ({type(error).__name__}: {error})") from error
    reasons: list[str] = []
    for warning, make_runner in _candidates(traits):
        try:
            runner = make_runner(model)
            with hooks.watch_output_layer(model) as was_called:
                for expected, compared in checks:
                    _check(expected, runner, compared)
            runner.has_hidden_states = was_called()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        if reasons:
            log.warning("%s %s (%s)", name, warning, reasons[0])
        if not batches.fit_kv_dtype(runner):
            raise ModelUnsupported(
                name, f"its keys or values do not fit into {traits.kv_dtype}; choose another --kv-dtype"
            )
        return runner
    if not batches.is_causal():
        raise ModelUnsupported(
            name, "tokens of its prompts attend to later ones (as in a prefix LM), so none can be cached"
        )
    packed, *_, sequential = reasons
    raise ModelUnsupported(
        name, f"it cannot run in packed batches ({packed}), nor one sequence at a time ({sequential})"
    )


def restore_runner(
    model: Any, traits: ModelTraits, layers: Sequence[CachedLayer], *, has_hidden_states: bool
) -> PackedRunner:
    """The packed runner that an earlier `find_runner` found, without another check."""
    hooks.set_attention(model, hooks.ATTENTION_NAME)
    runner = _packed_runner(model, traits, layers)
    runner.has_hidden_states = has_hidden_states
    return runner


def logit_difference(
    expected_runner: ModelRunner, actual_runner: ModelRunner, model: Any, traits: ModelTraits, kv_dtype: torch.dtype
) -> float:
    """The largest difference between the logits of two runners in the batches of the check, relative to the largest
    logit; with contents where the second runner supports them.

    kv_dtype  of cached keys and values during the check
    """
    texts = _CheckBatches(model, traits, [_test_sequence(model, traits, number) for number in range(2)])
    contents = [
        batches for batches in _content_batches(model, traits) if batches.are_supported(actual_runner, kv_dtype)
    ]
    errors = []
    for batches in (texts, *contents):
        expected, actual = (
            torch.cat(batches.batched_logits(runner, kv_dtype)) for runner in (expected_runner, actual_runner)
        )
        errors.append(float((expected - actual).abs().max() / expected.abs().max().clamp_min(1.0)))
    return max(errors)


def batch_dependence(runner: ModelRunner, model: Any, traits: ModelTraits) -> str | None:
    """Why the bits of a sequence may depend on its batch or its chunks; None: they do not.

    Compares two prompts, in chunks and in one batch, with each alone in one chunk. That shows little in some shapes, so
    an operation of torch that ran outside of the replacements is a reason too.
    """
    sequences = [_test_sequence(model, traits, number, _INVARIANCE_PROMPT) for number in (1, 2)]
    first, second = (len(sequence.prompt) for sequence in sequences)
    steps = ((0, 7),), ((0, 1), (1, second - 8)), ((0, first - 9), (1, 7)), ((0, 1), (1, 1))
    with UnreplacedOperations() as operations:
        batched = _CheckBatches(model, traits, sequences).all_logits(runner, steps)
    if operations.names:
        return f"torch computes {', '.join(sorted(operations.names))} otherwise in another batch"
    alone = [
        _CheckBatches(model, traits, [sequence]).all_logits(runner, (((0, len(sequence.prompt)),),))[0]
        for sequence in sequences
    ]
    return None if all(map(torch.equal, alone, batched)) else "its logits change with the batch"


class LogitsDiffer(Exception):
    """Logits of a batch differ from the logits of the model alone."""


_MakeRunner: TypeAlias = Callable[[Any], PackedRunner | SequentialRunner]


def _candidates(traits: ModelTraits) -> Iterator[tuple[str, _MakeRunner]]:
    """Ways to run the model, fastest first, each with the warning to log if all before it failed."""
    yield "", lambda model: _calibrated_runner(model, traits)
    if traits.attend is not reference.attend:
        torch_traits = replace(traits, attend=reference.attend)
        yield (
            "attends in torch operations, because the attention kernel changes its logits",
            lambda model: _calibrated_runner(model, torch_traits),
        )
    yield (
        "runs one sequence at a time, because packed batches change its logits",
        lambda model: _sequential_runner(model, traits),
    )


def _calibrated_runner(model: Any, traits: ModelTraits) -> PackedRunner:
    hooks.set_attention(model, hooks.ATTENTION_NAME)
    layers = _find_layers(model, traits)
    if not layers and not traits.recurrent:
        raise LogitsDiffer("its layers mix tokens by unknown operations")
    return _packed_runner(model, traits, layers)


def _find_layers(model: Any, traits: ModelTraits) -> tuple[CachedLayer, ...]:
    """The attention layers that store cells; with contents, whether placeholders attend to later ones in them."""
    layers, contents = find_cached_layers(model, vocabulary=traits.vocabulary), traits.contents
    if contents is None:
        return layers
    return tuple(layer.with_bidirectional(contents.is_bidirectional(layer.index)) for layer in layers)


def _packed_runner(model: Any, traits: ModelTraits, layers: Sequence[CachedLayer]) -> PackedRunner:
    """A packed runner; with two kinds of rotary factors, the layers beyond the original length are calibrated too."""
    long_factor_layers = None
    if traits.switch is not None:
        with rope.use_long_factors():
            long_factor_layers = _find_layers(model, traits)
    device = next(model.parameters()).device
    settings: dict[str, Any] = {"switch": traits.switch, "long_factor_layers": long_factor_layers}
    if device.type == "cpu":
        return PackedRunner(model, layers, traits.mla, traits.attend, **settings)
    recorder = recorder_for(device) if traits.records else None
    if recorder is None or traits.encoder is not None:
        return DeviceRunner(model, layers, traits.mla, traits.attend, **settings)
    return GraphRunner(model, layers, traits.mla, traits.attend, recorder=recorder, **settings)


def _sequential_runner(model: Any, traits: ModelTraits) -> SequentialRunner:
    hooks.set_attention(model, hooks.default_attention(model))
    return SequentialRunner(model, traits.switch)


def _check(expected: list[Tensor], runner: ModelRunner, batches: _CheckBatches) -> None:
    """Raise LogitsDiffer unless the runner's logits agree with the logits of the model alone."""
    model, dtype = batches.model, batches.traits.dtype
    try:
        actual = batches.batched_logits(runner, dtype)
        _compare(expected, actual, dtype)
    except LogitsDiffer as error:
        if dtype == torch.float64:
            # transformers computes norms, routers and recurrences in float32 whatever the dtype of the weights is.
            _compare(expected, actual, torch.float32)
            log.info("parts of the model are computed in float32: %s", error)
            return
        # In bfloat16, rounding alone makes routers choose other experts: the check is repeated in float32.
        if dtype != torch.bfloat16:
            raise
        with Float32Mode(model):
            with hooks.use_attention(model, hooks.default_attention(model)):
                expected = batches.expected_logits()
            _compare(expected, batches.batched_logits(runner, torch.float32), torch.float32)


def _compare(expected: list[Tensor], actual: list[Tensor], dtype: torch.dtype) -> None:
    for alone, batched in zip(expected, actual, strict=True):
        error, allowed = _error(alone, batched), _tolerance(dtype)
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


def _prompt_length(model: Any, switch: RopeSwitch | None = None) -> int:
    """Tokens of the longer prompt: beyond twice the longest affordable range, within the original length."""
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or _MAX_PROMPT
    limit = min(_MAX_PROMPT, _MAX_WEIGHT_TOKENS // weights_of(model), longest)
    limit = limit if switch is None else min(limit, switch.original_length)
    sizes = [size for name in _RANGE_FIELDS if isinstance(size := getattr(config, name, None), int)]
    return _MIN_PROMPT + max((2 * size for size in sizes if 2 * size + _MIN_PROMPT <= limit), default=0)


def _steps(length: int) -> _StepPlan:
    """Steps in which a continued prompt, a new prompt and single tokens share batches."""
    first = (length - 5) // 2
    return ((0, 4),), ((0, first), (1, 7)), ((0, length - 5 - first), (1, 1)), ((0, 1), (1, 1))


def _prompt(vocabulary: int, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (length,), generator=generator).tolist()


def _content_batches(model: Any, traits: ModelTraits) -> Iterator[_CheckBatches]:
    """For each kind of content, batches of a prompt with one and a text."""
    if traits.contents is None:
        return
    text = _prompt(traits.vocabulary, _MIN_PROMPT, 2)
    for sample in traits.contents.samples:
        content = SamplePrompt(traits.contents, sample, text[:5], text[5:])
        sequences = [_TestSequence(content.tokens, {}, content=content), _test_sequence(model, traits, 1)]
        first = content.middle - 4
        left = len(content.tokens) - content.middle - 1
        steps = ((0, 4),), ((0, first), (1, 7)), ((0, left), (1, 1)), ((0, 1), (1, 1))
        yield _CheckBatches(model, traits, sequences, steps)


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


class _CheckBatches:
    """Test sequences with their logits by the unmodified model, and by runners in batches of chunks."""

    def __init__(
        self, model: Any, traits: ModelTraits, sequences: Sequence[_TestSequence], steps: _StepPlan | None = None
    ) -> None:
        self.model, self.traits = model, traits
        self._steps = _steps(len(sequences[0].prompt)) if steps is None else steps
        self._sequences = sequences
        self._device = next(model.parameters()).device
        # Short rotary factors, and long ones if the model has them.
        self._rope_variants = (False,) if traits.switch is None else (False, True)

    def expected_logits(self) -> list[Tensor]:
        """The logits of `batched_logits`, by the unmodified model."""
        logits = []
        for long_factors in self._rope_variants:
            with rope.use_long_factors() if long_factors else nullcontext():
                logits += [
                    self._logits_alone(slot, _span_ends(self._steps, slot)) for slot in range(len(self._sequences))
                ]
        return logits

    def _logits_alone(self, slot: int, ends: list[int]) -> Tensor:
        """The logits [ends, vocabulary] of the last token before each end, by the unmodified model."""
        rows = torch.tensor(ends, device=self._device) - 1
        parameters = inspect.signature(type(self.model).forward).parameters
        selection = {"logits_to_keep": rows} if "logits_to_keep" in parameters else {}
        sequence = self._sequences[slot]
        inputs = sequence.inputs if sequence.content is None else sequence.content.reference_inputs()
        with torch.inference_mode(), StableTopK():
            output = self.model(**inputs, **selection, use_cache=False)
        logits: Tensor = output.logits[0]
        # A model that ignores logits_to_keep returns every row.
        return logits if logits.shape[0] == len(ends) else logits[rows]

    def is_causal(self) -> bool:
        """Whether the logits of the unmodified model after part of a prompt do not depend on the tokens after it.

        True for a model with an encoder, without a comparison.
        """
        first = self._sequences[0]
        if self.traits.encoder is not None:
            return True
        hooks.set_attention(self.model, hooks.default_attention(self.model))
        length = len(first.prompt) // 2
        part = _CheckBatches(
            self.model,
            self.traits,
            [
                _TestSequence(
                    first.prompt[:length], {**first.inputs, "input_ids": first.inputs["input_ids"][:, :length]}
                )
            ],
        )
        alone, within_prompt = (batches._logits_alone(0, [length]) for batches in (part, self))
        return _error(within_prompt, alone) <= _tolerance(self.traits.dtype)

    def batched_logits(self, runner: ModelRunner, kv_dtype: torch.dtype) -> list[Tensor]:
        """For each kind of rotary factors and each sequence, the logits [ends, vocabulary] at the ends of its spans."""
        return [
            logits
            for long_factors in self._rope_variants
            for logits in self._logits_at_ends(runner, kv_dtype, long_factors=long_factors)
        ]

    def _logits_at_ends(self, runner: ModelRunner, kv_dtype: torch.dtype, *, long_factors: bool) -> list[Tensor]:
        cache = self._cache(runner, kv_dtype)
        logits_by_slot: list[list[Tensor]] = [[] for _ in self._sequences]
        for step in self._steps:
            spans, tokens, further = self._batch(cache, step, long_factors=long_factors)
            logit_rows = [end - 1 for end in accumulate(span.length for span in spans)]
            with cache.forward(spans) as forward:
                logits = runner.run(StepInput(forward, tokens, logit_rows, **further)).logits
            for span, row in zip(spans, logits, strict=True):
                logits_by_slot[span.slot].append(row)
        return [torch.stack(rows) for rows in logits_by_slot]

    def are_supported(self, runner: ModelRunner, kv_dtype: torch.dtype) -> bool:
        """Whether a runner supports all steps."""
        cache, reasons = self._cache(runner, kv_dtype), []
        for step in self._steps:
            spans, tokens, further = self._batch(cache, step)
            with cache.forward(spans) as forward:
                reasons.append(runner.supports(StepInput(forward, tokens, (), **further).features))
        return all(reason is None for reason in reasons)

    def all_logits(self, runner: ModelRunner, steps: _StepPlan) -> list[Tensor]:
        """The logits [prompt, vocabulary] of each sequence."""
        cache = self._cache(runner, self.traits.kv_dtype or self.traits.dtype)
        logits_by_slot: list[list[Tensor]] = [[] for _ in self._sequences]
        for step in steps:
            spans, tokens, further = self._batch(cache, step)
            with cache.forward(spans) as forward:
                logits = runner.run(StepInput(forward, tokens, range(len(tokens)), **further)).logits
            for span, rows in zip(spans, torch.split(logits, [span.length for span in spans]), strict=True):
                logits_by_slot[span.slot].append(rows)
        return [torch.cat(rows) for rows in logits_by_slot]

    def fit_kv_dtype(self, runner: ModelRunner) -> bool:
        """Whether the logits are finite with keys and values in the configured dtype."""
        kv_dtype = self.traits.kv_dtype
        if kv_dtype is None or kv_dtype == self.traits.dtype:
            return True
        return all(bool(logits.isfinite().all()) for logits in self.batched_logits(runner, kv_dtype))

    def _cache(self, runner: ModelRunner, kv_dtype: torch.dtype) -> Cache:
        """An empty cache with two slots."""
        length = max(len(sequence.prompt) for sequence in self._sequences)
        return Cache(
            [layer.spec for layer in runner.layers],
            slots=2,
            capacity=length,
            cells=2 * length,
            state_bytes=0 if self.traits.recurrent else None,
            dtype=kv_dtype,
            device=self._device,
        )

    def _batch(
        self, cache: Cache, step: tuple[tuple[int, int], ...], *, long_factors: bool = False
    ) -> tuple[list[Span], list[int], dict[str, Any]]:
        """The spans of a step, their tokens and further fields of its StepInput."""
        spans = [self._span(slot, cache.cached_length(slot), length, long_factors) for slot, length in step]
        tokens = [token for span in spans for token in self._sequences[span.slot].prompt[span.start : span.stop]]
        sequences = [self._sequences[span.slot] for span in spans]
        rows, positions = batch_contents([sequence.content for sequence in sequences], spans)
        masks = [sequence.encoder_mask for sequence in sequences]
        return spans, tokens, {"encoder_masks": masks, "embeddings": rows, "positions": positions}

    def _span(self, slot: int, start: int, length: int, long_factors: bool) -> Span:
        content = self._sequences[slot].content
        ranges = () if content is None else content.bidirectional(start, start + length)
        return Span(slot, start, length, ranges, long_factors=long_factors)


def _span_ends(steps: _StepPlan, slot: int) -> list[int]:
    """Positions where the spans of a sequence end."""
    return list(accumulate(tokens for step in steps for number, tokens in step if number == slot))


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 6e-2)
