"""A chain of native steps says what single steps and the engine's own rule say, token after token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.native.draft_loop import DraftLoopInput
from engine.native.runner import NativeRunner
from engine.native.sampler import is_native
from engine.sample.penalties import PenaltyHistory
from engine.sample.sampler import SamplingContext, sample_tokens
from engine.types.request import Dry, SamplingParams, Xtc
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine.native.decoders import CONTEXT, Both, native, of_config, token
from tests.engine.tiny import VOCABULARY, settings
from tests.libraries import built

built("step")

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.7)
# The tokens that each sequence reads first, and how many it says then.
SHAPES = ((9, 4), (1, 6), (30, 0), (3, 1), (17, 6))


def draw(params: SamplingParams, slot: int = 0, position: int = 0) -> SamplingContext:
    """How a slot's next token is drawn."""
    return SamplingContext(params, 2**63 + 5 * slot, position, PenaltyHistory(params, (), VOCABULARY))


@dataclass
class Talk:
    """A model, its cells, and what each slot holds."""

    runner: NativeRunner
    stored: torch.dtype = torch.float32
    references: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        specs = [plan.spec for plan in self.runner.layers]
        self.cache = Cache(specs, slots=8, capacity=CONTEXT, cells=8 * CONTEXT, dtype=self.stored)

    def links(self, shapes: Sequence[tuple[int, int]], params: Sequence[SamplingParams]) -> list[DraftLoopInput]:
        """A link for each slot: it reads so many tokens and says so many."""
        made = []
        for slot, (length, count) in enumerate(shapes):
            start = len(self.references.get(slot, ()))
            tokens = [token(slot, at) for at in range(start, start + length)]
            made.append(DraftLoopInput(tokens, count, draw(params[slot % len(params)], slot, start + length)))
        return made

    def chained(self, links: Sequence[DraftLoopInput], choices: int = VOCABULARY) -> list[list[int]]:
        """What a chain says; all its rows are kept."""
        spans = [Span(slot, self.cache.cached_length(slot), link.batch_tokens) for slot, link in enumerate(links)]
        forward = self.cache.forward(spans)
        # Asked before it is open: the cells of another cache were read last.
        assert self.runner.supports_draft_loop(forward)
        with forward:
            said = self.runner.run_draft_loop(forward, links, choices)
        for slot, (link, own) in enumerate(zip(links, said, strict=True)):
            self.references.setdefault(slot, []).extend([*link.tokens, *own[: max(link.count - 1, 0)]])
        return said

    def stepped(self, links: Sequence[DraftLoopInput]) -> list[list[int]]:
        """What single steps say, a sequence at a time."""
        return [self._alone(slot, link) for slot, link in enumerate(links)]

    def _alone(self, slot: int, link: DraftLoopInput) -> list[int]:
        said: list[int] = []
        rows = list(link.tokens)
        while rows:
            with self.cache.forward([Span(slot, self.cache.cached_length(slot), len(rows))]) as forward:
                logits = self.runner.run(forward, rows, [len(rows) - 1])
            self.references.setdefault(slot, []).extend(rows)
            if len(said) < link.count:
                said += [one for one in sample_tokens(logits, [link.context.after(said)]) if one is not None]
            rows = said[-1:] if len(said) < link.count else []
        return said


def runner_of(model: Both) -> NativeRunner:
    """The native one of a model that has one."""
    assert isinstance(model.fastest, NativeRunner)
    return model.fastest


def same(runner: NativeRunner, params: Sequence[SamplingParams], stored: torch.dtype = torch.float32) -> int:
    """How many tokens two chains say, the second where the first left off, all as single steps say them."""
    talks, count = (Talk(runner, stored), Talk(runner, stored)), 0
    for _ in range(2):
        expected = talks[0].stepped(talks[0].links(SHAPES, params))
        assert talks[1].chained(talks[1].links(SHAPES, params)) == expected
        assert talks[0].references == talks[1].references
        count += sum(map(len, expected))
    return count


@pytest.mark.parametrize("weights", [32, 16, 8])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_neox", "mixtral"])
def test_a_chain_says_what_steps_say(family: str, weights: Any) -> None:
    """Sequences of all lengths at once, over windows, capped logits and experts, whatever weights are stored in."""
    assert same(runner_of(native(family, weights)), [GREEDY, WARM]) == 2 * sum(count for _, count in SHAPES)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_cells_may_be_stored_in_16_bits(stored: torch.dtype) -> None:
    """As for single steps."""
    assert same(runner_of(native("llama")), [WARM], stored) > 0


def test_logits_and_embeddings_may_be_scaled() -> None:
    """The scale of logits is part of the temperature."""
    own = {"embedding_multiplier": 3.0, "logits_scaling": 5.0}
    model = of_config(AutoConfig.for_model("granite", **{**settings("granite"), **own}))

    assert same(runner_of(model), [WARM, GREEDY]) > 0


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
def test_filters_keep_the_same_tokens(params: SamplingParams) -> None:
    """Those that a chain knows; none of them is asked for in vain."""
    runner = runner_of(native("llama"))
    loose = SamplingParams(temperature=params.temperature)
    some = Talk(runner), Talk(runner)
    filtered, free = (talk.chained(talk.links(SHAPES, [own])) for talk, own in zip(some, (params, loose), strict=True))

    assert is_native(draw(params))
    assert same(runner, [params]) > 0
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
def test_what_a_chain_cannot_draw_is_not_left_to_it(params: SamplingParams) -> None:
    """Other filters, and whatever changes logits."""
    assert not is_native(draw(params))


def test_tokens_are_chosen_among_the_first_ones() -> None:
    """As many as there are said to be."""
    said = Talk(runner_of(native("llama")))

    assert {one < 7 for own in said.chained(said.links(SHAPES, [WARM]), 7) for one in own} == {True}


def test_a_sequence_without_finite_logits_ends_alone() -> None:
    """Its neighbours go on, and it says what it said before."""
    model = of_config(AutoConfig.for_model("llama", **settings("llama")))
    runner = runner_of(model)
    talk = Talk(runner)
    whole = talk.stepped(talk.links(SHAPES, [GREEDY]))
    # The second token that the last sequence says, and that nobody else reads.
    broken = whole[4][1]
    assert broken not in {one for slot, own in talk.references.items() for one in own[: None if slot < 4 else -4]}
    model.model.get_input_embeddings().weight[broken] = torch.nan
    said = Talk(runner)

    assert said.chained(said.links(SHAPES, [GREEDY])) == [*whole[:4], whole[4][:2]]


def test_threads_change_no_token() -> None:
    """The same with one thread, two and three."""
    runner = runner_of(native("llama", 16))
    talk = Talk(runner)
    expected = talk.chained(talk.links(SHAPES, [WARM]))
    for threads in (2, 3):
        torch.set_num_threads(threads)
        again = Talk(runner)
        assert again.chained(again.links(SHAPES, [WARM])) == expected
