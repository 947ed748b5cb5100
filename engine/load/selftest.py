"""One check at load: what the model says in a packed, chunked batch must be what it says alone.

transformers changes often, and a model may compute positions or masks in a way that packing breaks. Such a model runs
one sequence at a time (sequential_runner.py); if that is not right either, it is refused here, in words, instead of
answering nonsense later.

Where it is cheap, the prompt is longer than twice what some layers look at (a window, a chunk, a selection of the
likeliest), so that what they must not see is there to be seen: as far as the weights are few enough, see `_MAX_WEIGHT_TOKENS`.
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
from engine.model.layers import CachedLayer, find_cached_layers
from engine.model.margins import within
from engine.model.rope import RopeSwitch
from engine.model.runner import PackedRunner
from engine.model.sequential_runner import SequentialRunner
from engine.model.ties import StableTopK
from engine.native.float32_mode import Float32Mode
from engine.types.request import MlaMode
from kvcache.cache import Cache
from kvcache.spec import Span

log = logging.getLogger("cellar.engine")

# How a configuration says of how many positions a layer sees, where these are not all.
_REACH_FIELDS = ("sliding_window", "attention_chunk_size", "index_topk", "window_size", "keep_window_size")
# The shortest and the longest prompt; between them, the weights times the tokens of the prompt are so many at most:
# measured on one core, the whole check takes 2 s there.
_MIN_PROMPT, _MAX_PROMPT, _MAX_WEIGHT_TOKENS = 9, 1024, 5 * 10**10
# The length of the prompts whose bits are compared: more than a tile of rows.
_INVARIANCE_PROMPT = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What is known of a model before it runs.

    recurrent  whether some of its layers keep a state
    dtype      in which it computes
    kv_dtype     in which its keys and values are kept; None: the same
    attend     how it attends to cells, if that turns out right
    switch     when its rotary factors change: then the check runs with both kinds; None: never
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
    """A sequence to be compared: its prompt, what the model takes to read it alone, and what its rows see of media."""

    prompt: list[int]
    inputs: Mapping[str, Tensor]
    encoder_mask: EncoderMask | None = None


def find_runner(name: str, model: Any, traits: ModelTraits) -> PackedRunner | SequentialRunner:
    """The fastest way to run the model over cells that says what the model says alone. Raises ModelUnsupported.

    The model's hooks (hooks.py, recurrence.py) must be in place; it is left as its runner needs it.
    """
    try:
        model.set_attn_implementation(_default_attention(model))
        cases = [_test_sequence(model, traits, number) for number in range(2)]
        alone = _expected_logits(model, cases, traits)
    except Exception as error:
        raise ModelUnsupported(name, f"it does not run ({type(error).__name__}: {error})") from error
    reasons: list[str] = []
    for confession, make in _candidates(traits):
        try:
            runner = make(model)
            with hooks.watch_output_layer(model) as was_called:
                _check(alone, runner, model, cases, traits)
            runner.has_hidden_states = was_called()
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        if reasons:
            log.warning("%s %s (%s)", name, confession, reasons[0])
        _check_kv_dtype(name, model, runner, cases, traits)
        return runner
    packed, *_, alone_too = reasons
    raise ModelUnsupported(
        name, f"it cannot run in packed batches ({packed}), nor one sequence at a time ({alone_too})"
    )


def restore_runner(
    model: Any, traits: ModelTraits, layers: Sequence[CachedLayer], *, has_hidden_states: bool
) -> PackedRunner:
    """The runner that an earlier `find_runner` found the fastest, without another check."""
    model.set_attn_implementation(hooks.ATTENTION_NAME)
    runner = _packed_runner(model, traits, layers)
    runner.has_hidden_states = has_hidden_states
    return runner


def _check_kv_dtype(
    name: str, model: Any, runner: PackedRunner | SequentialRunner, cases: list[_TestSequence], traits: ModelTraits
) -> None:
    stored = traits.kv_dtype or traits.dtype
    if stored == traits.dtype:
        return
    if not all(row.isfinite().all() for row in _batched_logits(runner, model, cases, traits, stored)):
        raise ModelUnsupported(name, f"its keys or values do not fit into {stored}; choose another --kv-dtype")


def logit_difference(
    expected_runner: PackedRunner, actual_runner: PackedRunner, model: Any, traits: ModelTraits, kv_dtype: torch.dtype
) -> float:
    """How far the logits of the check's batches differ if another runner plays them, in parts of the largest one.

    stored  in which keys and values are kept meanwhile
    """
    cases = [_test_sequence(model, traits, number) for number in range(2)]
    expected, actual = (
        torch.cat(_batched_logits(runner, model, cases, traits, kv_dtype))
        for runner in (expected_runner, actual_runner)
    )
    return float((expected - actual).abs().max() / expected.abs().max().clamp_min(1.0))


def is_batch_invariant(runner: PackedRunner | SequentialRunner, model: Any, traits: ModelTraits) -> bool:
    """Whether two prompts in chunks beside each other get the logits that each gets alone in one, bit for bit."""
    cases = [_test_sequence(model, traits, number, _INVARIANCE_PROMPT) for number in (1, 2)]
    first, second = (len(case.prompt) for case in cases)
    mixed = ((0, 7),), ((0, 1), (1, second - 8)), ((0, first - 9), (1, 7)), ((0, 1), (1, 1))
    together = _all_logits(runner, model, cases, traits, mixed)
    alone = [_all_logits(runner, model, [case], traits, (((0, len(case.prompt)),),))[0] for case in cases]
    return all(map(torch.equal, alone, together))


def _all_logits(
    runner: PackedRunner | SequentialRunner,
    model: Any,
    cases: list[_TestSequence],
    traits: ModelTraits,
    steps: _StepPlan,
) -> list[Tensor]:
    """For each case the logits [prompt, vocabulary] behind every token."""
    cache = _cache(runner, model, cases, traits, traits.kv_dtype or traits.dtype)
    told: list[list[Tensor]] = [[] for _ in cases]
    for step in steps:
        spans, tokens, sights = _batch(cache, cases, step)
        with cache.forward(spans) as forward:
            logits = runner.run(forward, tokens, list(range(len(tokens))), sights)
        for span, rows in zip(spans, torch.split(logits, [span.length for span in spans]), strict=True):
            told[span.slot].append(rows)
    return [torch.cat(rows) for rows in told]


class LogitsDiffer(Exception):
    """A batch changed what a sequence gets to hear."""


# Of each forward the sequences, and how many rows of them.
_StepPlan: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
_MakeRunner: TypeAlias = Callable[[Any], PackedRunner | SequentialRunner]


def _candidates(traits: ModelTraits) -> Iterator[tuple[str, _MakeRunner]]:
    """How a model may be run, fastest first, and what is said of it where all before it failed."""
    yield "", lambda model: _calibrated_runner(model, traits)
    if traits.attend is not reference.attend:
        plain = replace(traits, attend=reference.attend)
        yield (
            "attends in torch operations, for the C++ kernel changes it",
            lambda model: _calibrated_runner(model, plain),
        )
    yield "runs one sequence at a time, for packed batches change it", lambda model: _sequential_runner(model, traits)


def _calibrated_runner(model: Any, traits: ModelTraits) -> PackedRunner:
    model.set_attn_implementation(hooks.ATTENTION_NAME)
    layers = find_cached_layers(model, vocabulary=traits.vocabulary)
    if not layers and not traits.recurrent:
        raise LogitsDiffer("its layers mix along the sequence in no way that can be packed")
    return _packed_runner(model, traits, layers)


def _packed_runner(model: Any, traits: ModelTraits, layers: Sequence[CachedLayer]) -> PackedRunner:
    """A packed runner; where rotary factors change, the layers are planned beyond the original length too."""
    extended = None
    if traits.switch is not None:
        with rope.extending():
            extended = find_cached_layers(model, vocabulary=traits.vocabulary)
    return PackedRunner(model, layers, traits.mla, traits.attend, switch=traits.switch, extended_layers=extended)


def _sequential_runner(model: Any, traits: ModelTraits) -> SequentialRunner:
    model.set_attn_implementation(_default_attention(model))
    return SequentialRunner(model, traits.switch)


def _check(
    alone: list[Tensor],
    runner: PackedRunner | SequentialRunner,
    model: Any,
    cases: list[_TestSequence],
    traits: ModelTraits,
) -> None:
    """Raise _Differs unless a runner says what the model said alone."""
    try:
        played = _batched_logits(runner, model, cases, traits, traits.dtype)
        _compare(alone, played, traits.dtype)
    except LogitsDiffer as error:
        if traits.dtype == torch.float64:
            # transformers computes norms, routers and recurrences in float32 whatever the weights are.
            _compare(alone, played, torch.float32)
            log.info("parts of the model are computed in float32: %s", error)
            return
        # In few bits routers choose other experts by rounding alone: float32 tells whether anything else is behind it.
        if traits.dtype != torch.bfloat16:
            raise
        way = model.config._attn_implementation
        with Float32Mode(model):
            model.set_attn_implementation(_default_attention(model))
            alone = _expected_logits(model, cases, traits)
            model.set_attn_implementation(way)
            _compare(alone, _batched_logits(runner, model, cases, traits, torch.float32), torch.float32)


def _compare(alone: list[Tensor], batched: list[Tensor], dtype: torch.dtype) -> None:
    for expected, actual in zip(alone, batched, strict=True):
        error, allowed = _error(expected, actual), _tolerance(dtype)
        if not within(f"batched logits are those alone, {dtype}", error, allowed):
            raise LogitsDiffer(f"its logits differ by {error:.2g}, where {allowed:.2g} is rounding")


def _error(expected: Tensor, actual: Tensor) -> float:
    """The largest error of a row of logits, as root mean square, relative to the row's standard deviation.

    A few outliers among logits, such as unused tokens, hide no error of the others.
    """
    wide = expected.double()
    wrong = (wide - actual).square().mean(-1).sqrt()
    # Rounding is relative to the logits themselves: those that hardly differ among each other have no less of it.
    spread = torch.maximum(wide.std(-1, correction=0), 1e-2 * wide.abs().amax(-1)).clamp_min(1e-6)
    return float((wrong / spread).max())


def _default_attention(model: Any) -> str:
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def _prompt_length(model: Any, switch: RopeSwitch | None = None) -> int:
    """Of the longer prompt: twice the farthest reach that is short enough, and some; within the original length."""
    text = model.config.get_text_config()
    weights = sum(parameter.numel() for parameter in model.parameters())
    most = min(
        _MAX_PROMPT, _MAX_WEIGHT_TOKENS // weights, getattr(text, "max_position_embeddings", None) or _MAX_PROMPT
    )
    most = most if switch is None else min(most, switch.original_length)
    sizes = [size for name in _REACH_FIELDS if isinstance(size := getattr(text, name, None), int)]
    return _MIN_PROMPT + max((2 * size for size in sizes if 2 * size + _MIN_PROMPT <= most), default=0)


def _steps(length: int) -> _StepPlan:
    """Such that a continued prompt, a new one and single rows meet."""
    first = (length - 5) // 2
    return ((0, 4),), ((0, first), (1, 7)), ((0, length - 5 - first), (1, 1)), ((0, 1), (1, 1))


def _span_ends(steps: _StepPlan, number: int) -> list[int]:
    """Where the spans of a sequence end."""
    return list(accumulate(rows for step in steps for sequence, rows in step if sequence == number))


def _prompt(vocabulary: int, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (length,), generator=generator).tolist()


def _test_sequence(model: Any, traits: ModelTraits, number: int, length: int | None = None) -> _TestSequence:
    """The first sequence looks at media if any can; the others do where the model says nothing without."""
    length = length or (_MIN_PROMPT if number > 0 else _prompt_length(model, traits.switch))
    prompt, encoder = _prompt(traits.vocabulary, length, number), traits.encoder
    if encoder is None or (number > 0 and not encoder.required):
        return _TestSequence(prompt, {"input_ids": torch.tensor([prompt], device=next(model.parameters()).device)})
    prompt, media = encoder.sample_prompt(prompt), encoder.sample()
    return _TestSequence(
        prompt, encoder.reference_inputs(media, prompt), encoder.mask(encoder.encode(media), media, prompt)
    )


def _rope_variants(traits: ModelTraits) -> tuple[bool, ...]:
    """The rotary factors to check: the short ones, and the long ones where there are such."""
    return (False,) if traits.switch is None else (False, True)


def _expected_logits(model: Any, cases: list[_TestSequence], traits: ModelTraits) -> list[Tensor]:
    """What `_batched_logits` should give, by the model itself."""
    steps, rows = _steps(len(cases[0].prompt)), []
    for extended in _rope_variants(traits):
        with rope.extending() if extended else nullcontext():
            rows += [_logits_alone(model, case, _span_ends(steps, number)) for number, case in enumerate(cases)]
    return rows


def _logits_alone(model: Any, case: _TestSequence, ends: list[int]) -> Tensor:
    """The logits [ends, vocabulary] after so many tokens each, by the model itself."""
    rows = torch.tensor(ends, device=next(model.parameters()).device) - 1
    known = inspect.signature(type(model).forward).parameters
    kept = {"logits_to_keep": rows} if "logits_to_keep" in known else {}
    with torch.inference_mode(), StableTopK():
        logits: Tensor = model(**case.inputs, **kept, use_cache=False).logits[0]
    # A model that ignores what to keep returns every row.
    return logits if logits.shape[0] == len(ends) else logits[rows]


def _batched_logits(
    runner: PackedRunner | SequentialRunner,
    model: Any,
    cases: list[_TestSequence],
    traits: ModelTraits,
    kv_dtype: torch.dtype,
) -> list[Tensor]:
    """For each kind of rotary factors and each case the logits [ends, vocabulary] where its spans end."""
    return [
        rows
        for extended in _rope_variants(traits)
        for rows in _batched_logits_once(runner, model, cases, traits, kv_dtype, extended=extended)
    ]


def _batched_logits_once(
    runner: PackedRunner | SequentialRunner,
    model: Any,
    cases: list[_TestSequence],
    traits: ModelTraits,
    kv_dtype: torch.dtype,
    *,
    extended: bool,
) -> list[Tensor]:
    cache = _cache(runner, model, cases, traits, kv_dtype)
    heard: list[list[Tensor]] = [[] for _ in cases]
    for step in _steps(len(cases[0].prompt)):
        spans, tokens, sights = _batch(cache, cases, step, extended=extended)
        wanted = torch.tensor([span.length for span in spans]).cumsum(0) - 1
        with cache.forward(spans) as forward:
            logits = runner.run(forward, tokens, wanted.tolist(), sights)
        for span, row in zip(spans, logits, strict=True):
            heard[span.slot].append(row)
    return [torch.stack(rows) for rows in heard]


def _cache(
    runner: PackedRunner | SequentialRunner,
    model: Any,
    cases: list[_TestSequence],
    traits: ModelTraits,
    kv_dtype: torch.dtype,
) -> Cache:
    """An empty cache with a slot for each of two cases."""
    device = next(model.parameters()).device
    specs = [plan.spec for plan in runner.layers]
    state_bytes = 0 if traits.recurrent else None
    length = max(len(case.prompt) for case in cases)
    return Cache(
        specs, slots=2, capacity=length, cells=2 * length, state_bytes=state_bytes, dtype=kv_dtype, device=device
    )


def _batch(
    cache: Cache, cases: list[_TestSequence], step: tuple[tuple[int, int], ...], *, extended: bool = False
) -> tuple[list[Span], list[int], list[EncoderMask | None]]:
    """The spans of a step, their tokens, and what each sees of media."""
    spans = [Span(slot, cache.cached_length(slot), length, long_factors=extended) for slot, length in step]
    tokens = [token for span in spans for token in cases[span.slot].prompt[span.start : span.stop]]
    return spans, tokens, [cases[span.slot].encoder_mask for span in spans]


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 6e-2)
