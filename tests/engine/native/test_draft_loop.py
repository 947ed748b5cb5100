"""A draft loop samples the tokens of single steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.native.runner import NativeRunner
from engine.native.sampler import is_native
from engine.run.runner import DraftLoopInput, runners_of
from engine.sample.penalties import PenaltyHistory
from engine.sample.sampler import SamplingContext, sample_tokens
from engine.step.input import StepInput
from engine.types.request import Dry, SamplingParams, Xtc
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine.kit.tiny import VOCABULARY, settings
from tests.engine.native.decoders import CONTEXT, TinyModel, model_of_config, native, token
from tests.libraries import built
from tests.selection import quick

built("step")

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.7)
# For each sequence, the tokens to compute and to sample.
SHAPES = ((9, 4), (1, 6), (30, 0), (3, 1), (17, 6))


def context(params: SamplingParams, slot: int = 0, position: int = 0) -> SamplingContext:
    """The sampling context of a slot."""
    return SamplingContext(params, 2**63 + 5 * slot, position, PenaltyHistory(params, (), VOCABULARY))


@dataclass
class Session:
    """A model, its cache, and the tokens of each slot."""

    runner: NativeRunner
    stored: torch.dtype = torch.float32
    tokens_by_slot: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        specs = [plan.spec for plan in self.runner.layers]
        self.cache = Cache(specs, slots=8, capacity=CONTEXT, cells=8 * CONTEXT, dtype=self.stored)

    def inputs(self, shapes: Sequence[tuple[int, int]], params: Sequence[SamplingParams]) -> list[DraftLoopInput]:
        """An input for each slot: tokens to compute and to sample."""
        inputs = []
        for slot, (length, count) in enumerate(shapes):
            start = len(self.tokens_by_slot.get(slot, ()))
            tokens = [token(slot, at) for at in range(start, start + length)]
            inputs.append(DraftLoopInput(tokens, count, context(params[slot % len(params)], slot, start + length)))
        return inputs

    def run_draft_loop(self, inputs: Sequence[DraftLoopInput], choices: int = VOCABULARY) -> list[list[int]]:
        """The tokens of a draft loop; all of its cells are kept."""
        spans = [Span(slot, self.cache.cached_length(slot), own.batch_tokens) for slot, own in enumerate(inputs)]
        forward = self.cache.forward(spans)
        # Called before the forward is open, after a forward of another cache.
        assert self.runner.supports_draft_loop(forward)
        with forward:
            sampled = self.runner.run_draft_loop(forward, inputs, choices)
        for slot, (own, tokens) in enumerate(zip(inputs, sampled, strict=True)):
            self.tokens_by_slot.setdefault(slot, []).extend([*own.tokens, *tokens[: max(own.count - 1, 0)]])
        return sampled

    def run_steps(self, inputs: Sequence[DraftLoopInput]) -> list[list[int]]:
        """The tokens of single steps, one sequence at a time."""
        return [self._alone(slot, own) for slot, own in enumerate(inputs)]

    def _alone(self, slot: int, own: DraftLoopInput) -> list[int]:
        sampled: list[int] = []
        rows = list(own.tokens)
        while rows:
            with self.cache.forward([Span(slot, self.cache.cached_length(slot), len(rows))]) as forward:
                logits = self.runner.run(StepInput(forward, rows, [len(rows) - 1])).logits
            self.tokens_by_slot.setdefault(slot, []).extend(rows)
            if len(sampled) < own.count:
                sampled += [one for one in sample_tokens(logits, [own.context.after(sampled)]) if one is not None]
            rows = sampled[-1:] if len(sampled) < own.count else []
        return sampled


def runner_of(model: TinyModel) -> NativeRunner:
    """The native runner of a model."""
    assert isinstance(runners_of(model.runner)[0], NativeRunner)
    return model.runner


def compare(runner: NativeRunner, params: Sequence[SamplingParams], stored: torch.dtype = torch.float32) -> int:
    """The number of tokens of two draft loops, after comparing them with single steps."""
    sessions, count = (Session(runner, stored), Session(runner, stored)), 0
    for _ in range(2):
        expected = sessions[0].run_steps(sessions[0].inputs(SHAPES, params))
        assert sessions[1].run_draft_loop(sessions[1].inputs(SHAPES, params)) == expected
        assert sessions[0].tokens_by_slot == sessions[1].tokens_by_slot
        count += sum(map(len, expected))
    return count


@pytest.mark.parametrize(
    ("family", "weights"),
    quick(
        [("llama", 32), ("mistral", 16), ("gemma2", 8), ("gpt_neox", 32), ("mixtral", 8)],
        itertools.product(("llama", "mistral", "gemma2", "gpt_neox", "mixtral"), (32, 16, 8)),
    ),
)
def test_draft_loop_equals_single_steps(family: str, weights: Any) -> None:
    """Sequences of different lengths, windows, softcaps and experts, in all weight formats."""
    assert compare(runner_of(native(family, weights)), [GREEDY, WARM]) == 2 * sum(count for _, count in SHAPES)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_bfloat16_cells(stored: torch.dtype) -> None:
    assert compare(runner_of(native("llama")), [WARM], stored) > 0


def test_scaled_logits_and_embeddings() -> None:
    own = {"embedding_multiplier": 3.0, "logits_scaling": 5.0}
    model = model_of_config(AutoConfig.for_model("granite", **{**settings("granite"), **own}))

    assert compare(runner_of(model), [WARM, GREEDY]) > 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=1.5, top_k=3),
        SamplingParams(temperature=1.5, top_p=0.6),
        SamplingParams(temperature=1.5, min_p=0.3),
        SamplingParams(temperature=2.0, top_k=20, top_p=0.7, min_p=0.05),
        SamplingParams(temperature=1.0, top_k=VOCABULARY + 7, top_p=0.01),
        # At temperature 0 no filter matters.
        SamplingParams(temperature=0.0, typical_p=0.1, top_n_sigma=0.5, xtc=Xtc(0.5, 0.1)),
    ],
)
def test_native_filters_equal_the_sampler(params: SamplingParams) -> None:
    """Each filter changes some token."""
    runner = runner_of(native("llama"))
    loose = SamplingParams(temperature=params.temperature)
    some = Session(runner), Session(runner)
    filtered, free = (
        session.run_draft_loop(session.inputs(SHAPES, [own]))
        for session, own in zip(some, (params, loose), strict=True)
    )

    assert is_native(context(params))
    assert compare(runner, [params]) > 0
    assert (filtered == free) == (params == loose or params.temperature == 0.0)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(typical_p=0.9),
        SamplingParams(top_n_sigma=1.0),
        SamplingParams(xtc=Xtc(0.5, 0.1)),
        SamplingParams(temperature=0.0, frequency_penalty=0.1),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(dry=Dry(0.8, 1.75, 2)),
        SamplingParams(temperature=0.0, logit_bias=((3, 1.0),)),
    ],
)
def test_other_sampling_contexts_are_not_native(params: SamplingParams) -> None:
    """Other filters, and modified logits."""
    assert not is_native(context(params))


def test_only_the_vocabulary_is_sampled() -> None:
    sampled = Session(runner_of(native("llama")))

    assert {one < 7 for own in sampled.run_draft_loop(sampled.inputs(SHAPES, [WARM]), 7) for one in own} == {True}


@pytest.mark.parametrize("weights", [32, 16, 8])
@pytest.mark.parametrize("vocabulary", [7, 16, 37])
def test_logits_of_a_smaller_vocabulary_are_those_of_the_whole(weights: Any, vocabulary: int) -> None:
    """Also where it ends within a block of outputs."""
    runner = runner_of(native("llama", weights))
    sampled, steps = Session(runner), Session(runner)
    inputs = [DraftLoopInput([token(0, index) for index in range(9)], 1, context(GREEDY))]
    with steps.cache.forward([Span(0, 0, 9)]) as forward:
        logits = runner.run(StepInput(forward, inputs[0].tokens, [8])).logits

    assert sampled.run_draft_loop(inputs, vocabulary) == [[int(logits[0, :vocabulary].argmax())]]


def test_non_finite_logits_end_their_sequence_only() -> None:
    model = model_of_config(AutoConfig.for_model("llama", **settings("llama")))
    runner = runner_of(model)
    session = Session(runner)
    whole = session.run_steps(session.inputs(SHAPES, [GREEDY]))
    # The second sampled token of the last sequence, which no other sequence has.
    broken = whole[4][1]
    others = {one for slot, own in session.tokens_by_slot.items() for one in own[: None if slot < 4 else -4]}
    assert broken not in others
    model.model.get_input_embeddings().weight[broken] = torch.nan
    sampled = Session(runner)

    assert sampled.run_draft_loop(sampled.inputs(SHAPES, [GREEDY])) == [*whole[:4], whole[4][:2]]


def test_tokens_do_not_depend_on_threads() -> None:
    runner = runner_of(native("llama", 16))
    session = Session(runner)
    expected = session.run_draft_loop(session.inputs(SHAPES, [WARM]))
    for threads in (2, 3):
        torch.set_num_threads(threads)
        again = Session(runner)
        assert again.run_draft_loop(again.inputs(SHAPES, [WARM])) == expected
