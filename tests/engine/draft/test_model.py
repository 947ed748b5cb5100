"""The draft model: its drafts are the same in one native call and token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.draft.model import ModelDrafter
from engine.draft.slots import DraftSlot, NextTokens
from engine.run.packed import PackedRunner
from engine.sample.penalties import PenaltyHistory
from engine.sample.sampler import SamplingContext
from engine.schedule.draft import DraftRequest
from engine.types.request import SamplingParams, Xtc
from kvcache.cache import Cache
from tests.engine.kit.tiny import VOCABULARY
from tests.engine.native.decoders import CONTEXT, native, token
from tests.libraries import built

built("step")

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8)
# A filter without an effect that the native draft loop does not support: drafts are computed token by token.
NO_XTC = Xtc(probability=0.0)


class CountingDrafter(ModelDrafter):
    """Counts the drafts of the native draft loop."""

    native_drafts = 0

    def _run_draft_loop(
        self, requests: Sequence[DraftRequest], slots: Sequence[DraftSlot], missing: NextTokens
    ) -> dict[int, list[int]]:
        drafts = super()._run_draft_loop(requests, slots, missing)
        self.native_drafts += len(drafts)
        return drafts


def drafter(
    runner: PackedRunner | None = None,
    *,
    cells: int = 4 * CONTEXT,
    chunk: int = 64,
    draft_vocabulary: int | None = None,
) -> CountingDrafter:
    """A drafter of a tiny model, by default one that runs natively."""
    runner = native("llama").runner if runner is None else runner
    cache = Cache([plan.spec for plan in runner.layers], slots=4, capacity=CONTEXT, cells=cells)
    return CountingDrafter(cache, runner, vocabulary=VOCABULARY, chunk=chunk, draft_vocabulary=draft_vocabulary)


def draft_request(name: int, tokens: Sequence[int], limit: int = 5, params: SamplingParams = GREEDY) -> DraftRequest:
    """The request for a draft after a text."""
    return DraftRequest(
        f"{name}", tokens, limit, SamplingContext(params, name, len(tokens), PenaltyHistory(params, (), VOCABULARY))
    )


def text(slot: int, length: int) -> list[int]:
    """A text, by the number of its slot."""
    return [token(slot, at) for at in range(length)]


def without_loop(one: DraftRequest) -> DraftRequest:
    """The same request, which the native draft loop does not support."""
    return replace(one, draw=replace(one.draw, params=replace(one.draw.params, temperature=0.8, xtc=NO_XTC)))


def cached_prefix(some: CountingDrafter, tokens: Sequence[int]) -> int:
    """The leading tokens that the prefix tree has."""
    return some._cache.match_prefix(list(tokens)).length


@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_rejected_draft_tokens_are_not_cached(accepted: int) -> None:
    """Of a draft in which the text ends, the prefix tree gets the accepted tokens; the other cells are free."""
    some, start = drafter(), text(1, 20)
    (draft,) = some.propose([replace(draft_request(0, start, 6), emitted=3)])
    output = [*start[-3:], *draft[:accepted], VOCABULARY - 1]

    some.forget("0", output)

    assert 20 + accepted == cached_prefix(some, [*start, *draft])
    assert 20 + accepted == some._cache.cells - some._cache.free_cells


def test_the_text_of_a_sequence_that_loses_its_slot_is_cached() -> None:
    """Without its latest draft, which may be rejected."""
    some, texts = drafter(), [text(slot, 12) for slot in range(5)]
    drafts = [some.propose([draft_request(name, own)])[0] for name, own in enumerate(texts)]

    assert 12 == cached_prefix(some, [*texts[0], *drafts[0]])


def test_the_text_of_an_uncacheable_request_is_not_cached() -> None:
    """Neither at its end nor when it loses its slot."""
    some = drafter()
    for name in range(5):
        some.propose([replace(draft_request(name, text(name, 12)), cacheable=False)])
    for name in range(5):
        some.forget(str(name), [])

    assert some._cache._tree.node_count == 0
    assert some._cache.free_cells == some._cache.cells


def is_consistent(some: CountingDrafter) -> bool:
    """Whether the cached length of every slot equals the number of its tokens."""
    slots = some._slots._by_sequence.values()
    return all(some._cache.cached_length(slot.slot) == len(slot.tokens) for slot in slots)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("params", [GREEDY, WARM])
def test_drafts_equal_those_of_an_empty_cache(family: str, params: SamplingParams) -> None:
    """Over several steps with partly accepted drafts."""
    runner, chance = native(family).runner, random.Random(1)
    kept, texts = drafter(runner, chunk=CONTEXT), [text(name, 20 + name) for name in range(4)]
    for _ in range(6):
        requests = [draft_request(name, own, chance.randint(1, 6), params) for name, own in enumerate(texts)]
        drafts = kept.propose(requests)
        assert drafts == drafter(runner, chunk=CONTEXT).propose(requests)
        assert list(map(len, drafts)) == [one.limit for one in requests]
        assert is_consistent(kept)
        for own, draft in zip(texts, drafts, strict=True):
            own += [*draft[: chance.randint(0, len(draft))], chance.randrange(VOCABULARY)]
    assert kept.native_drafts == 24


def test_the_native_loop_drafts_the_same_tokens() -> None:
    """Also in a batch of requests with and without the native loop."""
    requests = [draft_request(name, text(name, 9 + 5 * name), name + 2, WARM) for name in range(4)]
    mixed = [without_loop(one) if name % 2 else one for name, one in enumerate(requests)]
    some = drafter(), drafter(), drafter(), drafter(native("llama").packed)
    drafts = [
        one.propose(batch)
        for one, batch in zip(some, (requests, list(map(without_loop, requests)), mixed, requests), strict=True)
    ]

    assert [one.native_drafts for one in some] == [4, 0, 2, 0]
    assert drafts[0] == drafts[1] == drafts[2] == drafts[3]
    assert all(map(is_consistent, some))
    assert [slot.tokens for slot in some[0]._slots._by_sequence.values()] == [
        slot.tokens for slot in some[1]._slots._by_sequence.values()
    ]


def test_a_lagging_slot_gets_no_draft() -> None:
    """All requests together compute at most a chunk at a time, and no token twice."""
    some, requests = (
        drafter(chunk=30),
        [draft_request(0, text(0, 20)), draft_request(1, text(1, 50)), draft_request(2, text(2, 7))],
    )
    lengths = [list(map(len, some.propose(requests))) for _ in range(4)]

    assert lengths == [[5, 0, 0], [5, 0, 0], [5, 5, 5], [5, 5, 5]]
    assert [list(map(len, some.propose([draft_request(3, text(3, 40))]))) for _ in range(2)] == [[0], [5]]
    assert is_consistent(some)


def test_with_too_few_cells_drafts_are_shorter() -> None:
    """As long as the cells allow; later texts get whole drafts."""
    some, own = drafter(cells=24), text(0, 21)
    found = some.propose([draft_request(0, own, 8)])
    expected = drafter().propose([draft_request(0, own, 8)])

    assert found == [expected[0][:4]]
    assert is_consistent(some)
    some.forget("0", ())
    assert some.propose([draft_request(1, own[:12], 5)]) == drafter().propose([draft_request(1, own[:12], 5)])


def test_nothing_is_drafted_beyond_the_end_of_the_cache() -> None:
    """A draft that does not fit the slot is not started."""
    some = drafter(chunk=CONTEXT)

    assert list(
        map(len, some.propose([draft_request(0, text(0, CONTEXT - 5)), draft_request(1, text(1, CONTEXT - 4))]))
    ) == [5, 0]


def test_tokens_beyond_the_draft_vocabulary_are_not_proposed() -> None:
    """As input they count as token 0."""
    some, own = drafter(draft_vocabulary=40), text(0, 30)
    requests = [draft_request(0, own, 6, WARM), draft_request(1, own, 6, GREEDY)]
    drafts = some.propose(requests)
    inputs = [one if one < 40 else 0 for one in own]

    assert max(map(max, drafts)) < 40
    assert drafts == drafter(draft_vocabulary=40).propose([replace(one, tokens=inputs) for one in requests])
