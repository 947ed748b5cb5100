"""A smaller model as a drafter: it says what it would say in the model's place, drawn with the model's own noise.

It has a cache of its own, over its own layers, with the same verbs: its slots follow the texts of the sequences, and
what it computed is remembered under its tokens (seats.py). So it may lag behind the model by any length, and works with
every kind of cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.draft.chain import Rows, chain, unread
from engine.draft.seats import Seat, Seats
from engine.model.model_runner import ModelRunner
from engine.native.draft_loop import DraftLoopInput
from engine.native.runner import NativeRunner
from engine.native.sampler import is_native
from engine.schedule.draft import Want
from kvcache.cache import Cache
from kvcache.spec import Span


class ModelDrafter:
    """Proposes what a smaller model says; implements Drafter.

    cache       over the smaller model's layers, with a slot for each sequence that runs at once
    vocabulary  tokens that the large model knows; the smaller one's output may be padded to more
    known       tokens that the smaller one knows, if fewer: the others it reads as its first, and never proposes
    chunk       rows of text that it catches up with in one call; who lags by more gets no draft yet
    """

    kind = "model"

    def __init__(
        self,
        cache: Cache,
        runner: ModelRunner,
        *,
        vocabulary: int,
        chunk: int,
        known: int | None = None,
    ) -> None:
        self._cache, self._runner, self._seats = cache, runner, Seats(cache)
        self._vocabulary, self._chunk = vocabulary, chunk
        self._known = vocabulary if known is None else known

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        """For each want the smaller model's continuation; none where it still has to read most of the text."""
        seats = self._seats.follow(wants)
        rows = unread(wants, seats, capacity=self._cache.capacity, most=self._chunk)
        said = self._say(wants, seats, {at: tokens for at, tokens in rows.items() if is_native(wants[at].draw)})
        others = {at: tokens for at, tokens in rows.items() if at not in said}
        drafts = chain(wants, seats, others, lambda rows: self._read(seats, rows))
        return [said.get(at, draft) for at, draft in enumerate(drafts)]

    def forget(self, sequence_id: str, said: Sequence[int]) -> None:
        """The sequence is over: what was computed for it may serve others."""
        self._seats.forget(sequence_id, said)

    def rest(self, budget_bytes: int) -> bool:
        """Save what is remembered to the shelf."""
        return self._cache.flush_to_disk(budget_bytes) > 0

    def _say(self, wants: Sequence[Want], seats: Sequence[Seat], rows: Rows) -> dict[int, list[int]]:
        """Drafts of those that can be drafted for in one native call, by the number of the want."""
        if not rows or not isinstance(self._runner, NativeRunner):
            return {}
        links = [self._link(wants[at], seats[at], tokens) for at, tokens in rows.items()]
        spans = [
            Span(seats[at].slot, len(seats[at].tokens), link.batch_tokens) for at, link in zip(rows, links, strict=True)
        ]
        forward = self._cache.forward(spans)
        if not self._runner.supports_draft_loop(forward) or self._cache.evict_for(spans):
            return {}
        with forward:
            said = dict(
                zip(rows, self._runner.run_draft_loop(forward, links, min(self._known, self._vocabulary)), strict=True)
            )
            for at, draft in said.items():
                # The last draft is known; its own row would only be computed for the next one.
                read = [*rows[at], *draft[: max(wants[at].limit - 1, 0)]]
                forward.keep(seats[at].slot, len(seats[at].tokens) + len(read))
                seats[at].tokens += read
        return said

    def _link(self, want: Want, seat: Seat, tokens: Sequence[int]) -> DraftLoopInput:
        """What a seat reads next, and how many tokens it says behind that: none while the text goes on."""
        reads_all = len(seat.tokens) + len(tokens) == len(want.tokens)
        return DraftLoopInput(self._readable(tokens), want.limit if reads_all else 0, want.draw)

    def _readable(self, tokens: Sequence[int]) -> list[int]:
        return [token if token < self._known else 0 for token in tokens]

    def _read(self, seats: Sequence[Seat], rows: Rows) -> Tensor | None:
        """Logits after the rows, one of each seat that has some; None if the cache has no room for them."""
        spans = [Span(seats[at].slot, len(seats[at].tokens), len(tokens)) for at, tokens in rows.items()]
        if self._cache.evict_for(spans):
            return None
        wanted, last = [], -1
        for span in spans:
            last += span.length
            wanted.append(last)
        with self._cache.forward(spans) as forward:
            read = [token for tokens in rows.values() for token in tokens]
            logits = self._runner.run(forward, self._readable(read), wanted)
        for at, tokens in rows.items():
            seats[at].tokens += tokens
        missing = self._vocabulary - logits.shape[-1]
        return pad(logits, (0, missing), value=-torch.inf) if missing else logits
