"""One check at load: what the model says in a packed, chunked batch must be what it says alone.

transformers changes often, and a model may compute positions or masks in a way that packing breaks. Such a model runs
one sequence at a time (sequential_runner.py); if that is not right either, it is refused here, in words, instead of
answering nonsense later.

Where it is cheap, the prompt is longer than twice what some layers look at (a window, a chunk, a selection of the
likeliest), so that what they must not see is there to be seen: as far as the weights are few enough, see `_WORK`.
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
from engine.kernels.reference import Attend
from engine.model import hooks, rope
from engine.model.encoder import Encoder
from engine.model.layers import LayerPlan, plan_layers
from engine.model.margins import within
from engine.model.rope import RopeSwitch
from engine.model.runner import Runner
from engine.model.sequential_runner import GatheringRunner
from engine.model.sight import Sight
from engine.model.ties import TiesInOrder
from engine.native.widening import Widened
from engine.types.request import MlaMode
from kvcache.cache import Cache
from kvcache.spec import Span

log = logging.getLogger("cellar.engine")

# How a configuration says of how many positions a layer sees, where these are not all.
_REACHES = ("sliding_window", "attention_chunk_size", "index_topk", "window_size", "keep_window_size")
# The shortest and the longest prompt; between them, the weights times the tokens of the prompt are so many at most:
# measured on one core, the whole check takes 2 s there.
_SHORTEST, _LONGEST, _WORK = 9, 1024, 5 * 10**10
# The length of the prompts whose bits are compared: more than a tile of rows.
_INVARIANT = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a model before it runs.

    recurrent  whether some of its layers keep a state
    dtype      in which it computes
    stored     in which its keys and values are kept; None: the same
    attend     how it attends to cells, if that turns out right
    switch     when its rotary factors change: then the check runs with both kinds; None: never
    """

    vocabulary: int
    recurrent: bool
    dtype: torch.dtype
    stored: torch.dtype | None = None
    mla: MlaMode = "auto"
    attend: Attend = reference.attend
    encoder: Encoder | None = None
    switch: RopeSwitch | None = None


@dataclass(frozen=True, slots=True)
class _Case:
    """A sequence to be compared: its prompt, what the model takes to read it alone, and what its rows see of media."""

    prompt: list[int]
    inputs: Mapping[str, Tensor]
    sight: Sight | None = None


def find_runner(name: str, model: Any, facts: Facts) -> Runner | GatheringRunner:
    """The fastest way to run the model over cells that says what the model says alone. Raises ModelUnsupported.

    The model's hooks (hooks.py, recurrence.py) must be in place; it is left as its runner needs it.
    """
    try:
        model.set_attn_implementation(_plain(model))
        cases = [_case(model, facts, number) for number in range(2)]
        alone = _expected(model, cases, facts)
    except Exception as error:
        raise ModelUnsupported(name, f"it does not run ({type(error).__name__}: {error})") from error
    reasons: list[str] = []
    for confession, make in _ways(facts):
        try:
            runner = make(model)
            with hooks.watching_output(model) as was_called:
                _check(alone, runner, model, cases, facts)
            runner.has_states = was_called()
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        if reasons:
            log.warning("%s %s (%s)", name, confession, reasons[0])
        _check_stored(name, model, runner, cases, facts)
        return runner
    packed, *_, alone_too = reasons
    raise ModelUnsupported(
        name, f"it cannot run in packed batches ({packed}), nor one sequence at a time ({alone_too})"
    )


def known_runner(model: Any, facts: Facts, layers: Sequence[LayerPlan], *, has_states: bool) -> Runner:
    """The runner that an earlier `find_runner` found the fastest, without another check."""
    model.set_attn_implementation(hooks.NAME)
    runner = _runner(model, facts, layers)
    runner.has_states = has_states
    return runner


def _check_stored(name: str, model: Any, runner: Runner | GatheringRunner, cases: list[_Case], facts: Facts) -> None:
    stored = facts.stored or facts.dtype
    if stored == facts.dtype:
        return
    if not all(row.isfinite().all() for row in _played(runner, model, cases, facts, stored)):
        raise ModelUnsupported(name, f"its keys or values do not fit into {stored}; choose another --kv-dtype")


def difference(plain: Runner, other: Runner, model: Any, facts: Facts, stored: torch.dtype) -> float:
    """How far the logits of the check's batches differ if another runner plays them, in parts of the largest one.

    stored  in which keys and values are kept meanwhile
    """
    cases = [_case(model, facts, number) for number in range(2)]
    expected, actual = (torch.cat(_played(runner, model, cases, facts, stored)) for runner in (plain, other))
    return float((expected - actual).abs().max() / expected.abs().max().clamp_min(1.0))


def is_batch_invariant(runner: Runner | GatheringRunner, model: Any, facts: Facts) -> bool:
    """Whether two prompts in chunks beside each other get the logits that each gets alone in one, bit for bit."""
    cases = [_case(model, facts, number, _INVARIANT) for number in (1, 2)]
    first, second = (len(case.prompt) for case in cases)
    mixed = ((0, 7),), ((0, 1), (1, second - 8)), ((0, first - 9), (1, 7)), ((0, 1), (1, 1))
    together = _all_rows(runner, model, cases, facts, mixed)
    alone = [_all_rows(runner, model, [case], facts, (((0, len(case.prompt)),),))[0] for case in cases]
    return all(map(torch.equal, alone, together))


def _all_rows(
    runner: Runner | GatheringRunner, model: Any, cases: list[_Case], facts: Facts, steps: _Steps
) -> list[Tensor]:
    """For each case the logits [prompt, vocabulary] behind every token."""
    cache = _cache(runner, model, cases, facts, facts.stored or facts.dtype)
    told: list[list[Tensor]] = [[] for _ in cases]
    for step in steps:
        spans, tokens, sights = _batch(cache, cases, step)
        with cache.forward(spans) as forward:
            logits = runner.run(forward, tokens, list(range(len(tokens))), sights)
        for span, rows in zip(spans, torch.split(logits, [span.length for span in spans]), strict=True):
            told[span.slot].append(rows)
    return [torch.cat(rows) for rows in told]


class _Differs(Exception):
    """A batch changed what a sequence gets to hear."""


# Of each forward the sequences, and how many rows of them.
_Steps: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
_Make: TypeAlias = Callable[[Any], Runner | GatheringRunner]


def _ways(facts: Facts) -> Iterator[tuple[str, _Make]]:
    """How a model may be run, fastest first, and what is said of it where all before it failed."""
    yield "", lambda model: _packed(model, facts)
    if facts.attend is not reference.attend:
        plain = replace(facts, attend=reference.attend)
        yield "attends in torch operations, for the C++ kernel changes it", lambda model: _packed(model, plain)
    yield "runs one sequence at a time, for packed batches change it", lambda model: _gathering(model, facts)


def _packed(model: Any, facts: Facts) -> Runner:
    model.set_attn_implementation(hooks.NAME)
    layers = plan_layers(model, vocabulary=facts.vocabulary)
    if not layers and not facts.recurrent:
        raise _Differs("its layers mix along the sequence in no way that can be packed")
    return _runner(model, facts, layers)


def _runner(model: Any, facts: Facts, layers: Sequence[LayerPlan]) -> Runner:
    """A packed runner; where rotary factors change, the layers are planned beyond the original length too."""
    extended = None
    if facts.switch is not None:
        with rope.extending():
            extended = plan_layers(model, vocabulary=facts.vocabulary)
    return Runner(model, layers, facts.mla, facts.attend, switch=facts.switch, extended_layers=extended)


def _gathering(model: Any, facts: Facts) -> GatheringRunner:
    model.set_attn_implementation(_plain(model))
    return GatheringRunner(model, facts.switch)


def _check(alone: list[Tensor], runner: Runner | GatheringRunner, model: Any, cases: list[_Case], facts: Facts) -> None:
    """Raise _Differs unless a runner says what the model said alone."""
    try:
        played = _played(runner, model, cases, facts, facts.dtype)
        _compare(alone, played, facts.dtype)
    except _Differs as error:
        if facts.dtype == torch.float64:
            # transformers computes norms, routers and recurrences in float32 whatever the weights are.
            _compare(alone, played, torch.float32)
            log.info("parts of the model are computed in float32: %s", error)
            return
        # In few bits routers choose other experts by rounding alone: float32 tells whether anything else is behind it.
        if facts.dtype != torch.bfloat16:
            raise
        way = model.config._attn_implementation
        with Widened(model):
            model.set_attn_implementation(_plain(model))
            alone = _expected(model, cases, facts)
            model.set_attn_implementation(way)
            _compare(alone, _played(runner, model, cases, facts, torch.float32), torch.float32)


def _compare(alone: list[Tensor], batched: list[Tensor], dtype: torch.dtype) -> None:
    for expected, actual in zip(alone, batched, strict=True):
        error, allowed = _error(expected, actual), _tolerance(dtype)
        if not within(f"batched logits are those alone, {dtype}", error, allowed):
            raise _Differs(f"its logits differ by {error:.2g}, where {allowed:.2g} is rounding")


def _error(expected: Tensor, actual: Tensor) -> float:
    """The largest error of a row of logits, as root mean square, relative to the row's standard deviation.

    A few outliers among logits, such as unused tokens, hide no error of the others.
    """
    wide = expected.double()
    wrong = (wide - actual).square().mean(-1).sqrt()
    # Rounding is relative to the logits themselves: those that hardly differ among each other have no less of it.
    spread = torch.maximum(wide.std(-1, correction=0), 1e-2 * wide.abs().amax(-1)).clamp_min(1e-6)
    return float((wrong / spread).max())


def _plain(model: Any) -> str:
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def _length(model: Any, switch: RopeSwitch | None = None) -> int:
    """Of the longer prompt: twice the farthest reach that is short enough, and some; within the original length."""
    text = model.config.get_text_config()
    weights = sum(parameter.numel() for parameter in model.parameters())
    most = min(_LONGEST, _WORK // weights, getattr(text, "max_position_embeddings", None) or _LONGEST)
    most = most if switch is None else min(most, switch.original)
    sizes = [size for name in _REACHES if isinstance(size := getattr(text, name, None), int)]
    return _SHORTEST + max((2 * size for size in sizes if 2 * size + _SHORTEST <= most), default=0)


def _steps(length: int) -> _Steps:
    """Such that a continued prompt, a new one and single rows meet."""
    first = (length - 5) // 2
    return ((0, 4),), ((0, first), (1, 7)), ((0, length - 5 - first), (1, 1)), ((0, 1), (1, 1))


def _ends(steps: _Steps, number: int) -> list[int]:
    """Where the spans of a sequence end."""
    return list(accumulate(rows for step in steps for sequence, rows in step if sequence == number))


def _prompt(vocabulary: int, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (length,), generator=generator).tolist()


def _case(model: Any, facts: Facts, number: int, length: int | None = None) -> _Case:
    """The first sequence looks at media if any can; the others do where the model says nothing without."""
    length = length or (_SHORTEST if number > 0 else _length(model, facts.switch))
    prompt, encoder = _prompt(facts.vocabulary, length, number), facts.encoder
    if encoder is None or (number > 0 and not encoder.needed):
        return _Case(prompt, {"input_ids": torch.tensor([prompt], device=next(model.parameters()).device)})
    prompt, media = encoder.sample_prompt(prompt), encoder.sample()
    return _Case(prompt, encoder.alone(media, prompt), encoder.sight(encoder.encode(media), media, prompt))


def _variants(facts: Facts) -> tuple[bool, ...]:
    """The rotary factors to check: the short ones, and the long ones where there are such."""
    return (False,) if facts.switch is None else (False, True)


def _expected(model: Any, cases: list[_Case], facts: Facts) -> list[Tensor]:
    """What `_played` should give, by the model itself."""
    steps, rows = _steps(len(cases[0].prompt)), []
    for extended in _variants(facts):
        with rope.extending() if extended else nullcontext():
            rows += [_alone(model, case, _ends(steps, number)) for number, case in enumerate(cases)]
    return rows


def _alone(model: Any, case: _Case, ends: list[int]) -> Tensor:
    """The logits [ends, vocabulary] after so many tokens each, by the model itself."""
    rows = torch.tensor(ends, device=next(model.parameters()).device) - 1
    known = inspect.signature(type(model).forward).parameters
    kept = {"logits_to_keep": rows} if "logits_to_keep" in known else {}
    with torch.inference_mode(), TiesInOrder():
        logits: Tensor = model(**case.inputs, **kept, use_cache=False).logits[0]
    # A model that ignores what to keep returns every row.
    return logits if logits.shape[0] == len(ends) else logits[rows]


def _played(
    runner: Runner | GatheringRunner, model: Any, cases: list[_Case], facts: Facts, stored: torch.dtype
) -> list[Tensor]:
    """For each kind of rotary factors and each case the logits [ends, vocabulary] where its spans end."""
    return [
        rows
        for extended in _variants(facts)
        for rows in _played_once(runner, model, cases, facts, stored, extended=extended)
    ]


def _played_once(
    runner: Runner | GatheringRunner,
    model: Any,
    cases: list[_Case],
    facts: Facts,
    stored: torch.dtype,
    *,
    extended: bool,
) -> list[Tensor]:
    cache = _cache(runner, model, cases, facts, stored)
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
    runner: Runner | GatheringRunner, model: Any, cases: list[_Case], facts: Facts, stored: torch.dtype
) -> Cache:
    """An empty cache with a slot for each of two cases."""
    device = next(model.parameters()).device
    specs = [plan.spec for plan in runner.layers]
    state_bytes = 0 if facts.recurrent else None
    length = max(len(case.prompt) for case in cases)
    return Cache(
        specs, slots=2, capacity=length, cells=2 * length, state_bytes=state_bytes, dtype=stored, device=device
    )


def _batch(
    cache: Cache, cases: list[_Case], step: tuple[tuple[int, int], ...], *, extended: bool = False
) -> tuple[list[Span], list[int], list[Sight | None]]:
    """The spans of a step, their tokens, and what each sees of media."""
    spans = [Span(slot, cache.length(slot), length, extended=extended) for slot, length in step]
    tokens = [token for span in spans for token in cases[span.slot].prompt[span.start : span.stop]]
    return spans, tokens, [cases[span.slot].sight for span in spans]


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 6e-2)
