"""A smaller model as a drafter: in one native call or token by token, it says what the model itself would say there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.draft.model import ModelDrafter
from engine.draft.slots import DraftSlot, NextTokens
from engine.model.runner import PackedRunner
from engine.sample.penalties import PenaltyHistory
from engine.sample.sampler import SamplingContext
from engine.schedule.draft import DraftRequest
from engine.types.request import SamplingParams, Xtc
from kvcache.cache import Cache
from tests.engine.native.decoders import CONTEXT, native, token
from tests.engine.tiny import VOCABULARY
from tests.libraries import built

built("step")

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8)
# A filter that no chain knows, and that keeps every token: with it, drafts are made token by token.
SLOWLY = Xtc(probability=0.0)


class Watched(ModelDrafter):
    """Counts the requests that one native call made drafts for."""

    chained = 0

    def _run_native_loop(
        self, requests: Sequence[DraftRequest], slots: Sequence[DraftSlot], missing: NextTokens
    ) -> dict[int, list[int]]:
        drafts = super()._run_native_loop(requests, slots, missing)
        self.chained += len(drafts)
        return drafts


def drafter(
    runner: PackedRunner | None = None,
    *,
    cells: int = 4 * CONTEXT,
    chunk: int = 64,
    draft_vocabulary: int | None = None,
) -> Watched:
    """A tiny model, by default one that runs natively."""
    runner = native("llama").runner if runner is None else runner
    cache = Cache([plan.spec for plan in runner.layers], slots=4, capacity=CONTEXT, cells=cells)
    return Watched(cache, runner, vocabulary=VOCABULARY, chunk=chunk, draft_vocabulary=draft_vocabulary)


def want(name: int, tokens: Sequence[int], limit: int = 5, params: SamplingParams = GREEDY) -> DraftRequest:
    """A draft behind a text."""
    return DraftRequest(
        f"{name}", tokens, limit, SamplingContext(params, name, len(tokens), PenaltyHistory(params, (), VOCABULARY))
    )


def text(slot: int, length: int) -> list[int]:
    """Some text."""
    return [token(slot, at) for at in range(length)]


def slowly(one: DraftRequest) -> DraftRequest:
    """The same, token by token."""
    return replace(one, draw=replace(one.draw, params=replace(one.draw.params, temperature=0.8, xtc=SLOWLY)))


def known(some: Watched, tokens: Sequence[int]) -> int:
    """Leading tokens that are remembered."""
    return some._cache.match_prefix(list(tokens)).length


@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_rejected_draft_tokens_are_not_cached(accepted: int) -> None:
    """A text ends inside a draft: of the draft only what became output serves others, and no cell holds the rest."""
    some, start = drafter(), text(1, 20)
    (draft,) = some.propose([replace(want(0, start, 6), emitted=3)])
    output = [*start[-3:], *draft[:accepted], VOCABULARY - 1]

    some.forget("0", output)

    assert 20 + accepted == known(some, [*start, *draft])
    assert 20 + accepted == some._cache.cells - some._cache.free_cells


def test_of_a_sequence_that_loses_its_slot_the_text_is_remembered() -> None:
    """Nobody knows what becomes of its latest draft."""
    some, texts = drafter(), [text(slot, 12) for slot in range(5)]
    drafts = [some.propose([want(name, own)])[0] for name, own in enumerate(texts)]

    assert 12 == known(some, [*texts[0], *drafts[0]])


def stands(some: Watched) -> bool:
    """Whether every slot holds what its seat says it holds."""
    seats = some._slots._by_sequence.values()
    return all(some._cache.cached_length(seat.slot) == len(seat.tokens) for seat in seats)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("params", [GREEDY, WARM])
def test_drafts_are_what_somebody_new_would_draft(family: str, params: SamplingParams) -> None:
    """Texts go on, with drafts that were right for a while: what is kept of a draft is as if it were read anew."""
    runner, chance = native(family).runner, random.Random(1)
    kept, texts = drafter(runner, chunk=CONTEXT), [text(name, 20 + name) for name in range(4)]
    for _ in range(6):
        wants = [want(name, own, chance.randint(1, 6), params) for name, own in enumerate(texts)]
        drafts = kept.propose(wants)
        assert drafts == drafter(runner, chunk=CONTEXT).propose(wants)
        assert list(map(len, drafts)) == [one.limit for one in wants]
        assert stands(kept)
        for own, draft in zip(texts, drafts, strict=True):
            own += [*draft[: chance.randint(0, len(draft))], chance.randrange(VOCABULARY)]
    assert kept.chained == 24


def test_one_native_call_or_many_say_the_same() -> None:
    """In one batch too, where some drafts can be made at once and others cannot."""
    wants = [want(name, text(name, 9 + 5 * name), name + 2, WARM) for name in range(4)]
    mixed = [slowly(one) if name % 2 else one for name, one in enumerate(wants)]
    some = drafter(), drafter(), drafter(), drafter(native("llama").packed)
    drafts = [
        one.propose(asked) for one, asked in zip(some, (wants, list(map(slowly, wants)), mixed, wants), strict=True)
    ]

    assert [one.chained for one in some] == [4, 0, 2, 0]
    assert drafts[0] == drafts[1] == drafts[2] == drafts[3]
    assert all(map(stands, some))
    assert [seat.tokens for seat in some[0]._slots._by_sequence.values()] == [
        seat.tokens for seat in some[1]._slots._by_sequence.values()
    ]


def test_a_lagging_slot_gets_no_draft() -> None:
    """Together they read no more than a chunk at a time; nothing is read twice."""
    some, wants = drafter(chunk=30), [want(0, text(0, 20)), want(1, text(1, 50)), want(2, text(2, 7))]
    lengths = [list(map(len, some.propose(wants))) for _ in range(4)]

    assert lengths == [[5, 0, 0], [5, 0, 0], [5, 5, 5], [5, 5, 5]]
    assert [list(map(len, some.propose([want(3, text(3, 40))]))) for _ in range(2)] == [[0], [5]]
    assert stands(some)


def test_without_room_for_all_drafts_there_are_some() -> None:
    """A cache of few cells: as many tokens as they hold, and later texts are drafted for as ever."""
    some, own = drafter(cells=24), text(0, 21)
    found = some.propose([want(0, own, 8)])
    expected = drafter().propose([want(0, own, 8)])

    assert found == [expected[0][:4]]
    assert stands(some)
    some.forget("0", ())
    assert some.propose([want(1, own[:12], 5)]) == drafter().propose([want(1, own[:12], 5)])


def test_nothing_is_drafted_beyond_the_end_of_the_cache() -> None:
    """Where the draft would not fit a slot."""
    some = drafter(chunk=CONTEXT)

    assert list(map(len, some.propose([want(0, text(0, CONTEXT - 5)), want(1, text(1, CONTEXT - 4))]))) == [5, 0]


def test_tokens_beyond_the_draft_vocabulary_are_not_proposed() -> None:
    """Nor read as anything but its first token."""
    some, own = drafter(draft_vocabulary=40), text(0, 30)
    wants = [want(0, own, 6, WARM), want(1, own, 6, GREEDY)]
    drafts = some.propose(wants)
    known = [one if one < 40 else 0 for one in own]

    assert max(map(max, drafts)) < 40
    assert drafts == drafter(draft_vocabulary=40).propose([replace(one, tokens=known) for one in wants])
