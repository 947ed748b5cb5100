"""A smaller model as a drafter: it says what it would say in the model's place, drawn with the model's own noise.

It has a cache of its own, over its own layers, with the same verbs: its slots follow the texts of the sequences, and
what it computed is remembered under its tokens. A sequence that comes back, shares a prompt or was shifted is followed
by recalling and rewinding. So it may lag behind the model by any length, and works with every kind of cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.draft.drafter import Want
from engine.gathering import GatheringRunner
from engine.prefix import common_prefix
from engine.runner import Runner
from engine.sampling import emit
from kvcache.cache import Cache
from kvcache.spec import Span

# Tokens that are missing before somebody else's work is looked for.
_WORTH_A_LOOK = 16


@dataclass(slots=True)
class _Seat:
    """A slot of the drafter's cache.

    used     when it was wanted last
    tokens   what it holds
    dropped  tokens that context shifts had taken from the text when it was wanted last
    checked  leading tokens of the text that were compared then: they are the same until a shift
    """

    slot: int
    salt: bytes
    used: int
    tokens: list[int] = field(default_factory=list)
    dropped: int = 0
    checked: int = 0


class ModelDrafter:
    """Proposes what a smaller model says; implements Drafter.

    cache       over the smaller model's layers, with a slot for each sequence that runs at once
    vocabulary  tokens that the large model knows; the smaller one's output may be padded to more
    known       tokens that the smaller one knows, if fewer: the others it reads as its first, and never proposes
    chunk       rows of text that it catches up with in one call; who lags by more gets no draft yet
    """

    kind = "model"

    def __init__(
        self, cache: Cache, runner: Runner | GatheringRunner, *, vocabulary: int, chunk: int, known: int | None = None
    ) -> None:
        self._cache, self._runner = cache, runner
        self._vocabulary, self._chunk = vocabulary, chunk
        self._known = vocabulary if known is None else known
        self._free = list(range(cache.slots - 1, -1, -1))
        self._seats: dict[str, _Seat] = {}
        self._clock = 0

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        """For each want the smaller model's continuation; none where it still has to read most of the text."""
        self._clock += 1
        drafts: list[list[int]] = [[] for _ in wants]
        seats = [self._follow(want) for want in wants]
        rows = self._unread(wants, seats)
        while rows:
            logits = self._read(seats, rows)
            going = [at for at in rows if self._goes_on(wants[at], seats[at], drafts[at])]
            if logits is None or not going:
                break
            behind = [row for row, at in enumerate(rows) if at in going]
            said = emit(logits[behind], [wants[at].draw.after(drafts[at]) for at in going])
            rows = {at: [token] for at, token in zip(going, said, strict=True) if token is not None}
            for at, tokens in rows.items():
                drafts[at] += tokens
            # The last draft is known; its own row would only be computed for the next one.
            rows = {at: tokens for at, tokens in rows.items() if len(drafts[at]) < wants[at].limit}
        return drafts

    def observe(self, sequence_id: str, tokens: Sequence[int]) -> None:
        """Nothing to do: the next want brings the whole text."""

    def forget(self, sequence_id: str) -> None:
        """The sequence is over: what was computed for it may serve others."""
        seat = self._seats.pop(sequence_id, None)
        if seat is not None:
            self._cache.remember(seat.slot, seat.tokens, salt=seat.salt)
            self._cache.clear(seat.slot)
            self._free.append(seat.slot)

    def rest(self, budget_bytes: int) -> bool:
        """Save what is remembered to the shelf."""
        return self._cache.save_some(budget_bytes)

    def _follow(self, want: Want) -> _Seat:
        """The seat of a sequence, standing at a beginning of its text, before the last token."""
        seat = self._seats.get(want.sequence_id)
        if seat is None:
            seat = self._seats[want.sequence_id] = _Seat(self._slot(), want.salt, self._clock)
        seat.used = self._clock
        common = self._common(seat, want)
        standing = self._cache.rewind(seat.slot, common) if common < len(seat.tokens) else common
        del seat.tokens[standing:]
        if standing + _WORTH_A_LOOK < len(want.tokens) - 1:
            standing = self._cache.recall(seat.slot, want.tokens[:-1], salt=seat.salt)
            seat.tokens += want.tokens[len(seat.tokens) : standing]
        return seat

    def _common(self, seat: _Seat, want: Want) -> int:
        """How much of the text, but for its last token, the seat holds. What was compared before is not again."""
        dropped, end = want.draw.position - len(want.tokens), len(want.tokens) - 1
        at = min(seat.checked, len(seat.tokens)) if dropped == seat.dropped else 0
        seat.dropped, seat.checked = dropped, end
        return at + common_prefix(seat.tokens[at:end], list(want.tokens[at:end]))

    def _slot(self) -> int:
        """A free slot; that of the sequence that was not wanted for longest if there is none."""
        if not self._free:
            self.forget(min(self._seats, key=lambda name: self._seats[name].used))
        return self._free.pop()

    def _unread(self, wants: Sequence[Want], seats: Sequence[_Seat]) -> dict[int, list[int]]:
        """The tokens that each seat has to read next, all together no more than the chunk."""
        rows, left = {}, self._chunk
        for at, (want, seat) in enumerate(zip(wants, seats, strict=True)):
            tokens = list(want.tokens[len(seat.tokens) : len(seat.tokens) + left])
            if tokens and len(want.tokens) + want.limit <= self._cache.capacity:
                rows[at] = tokens
                left -= len(tokens)
        return rows

    def _goes_on(self, want: Want, seat: _Seat, draft: Sequence[int]) -> bool:
        """Whether a seat has read all of its text and its draft, so that its logits tell the next token."""
        return len(draft) < want.limit and len(seat.tokens) == len(want.tokens) + len(draft)

    def _read(self, seats: Sequence[_Seat], rows: Mapping[int, list[int]]) -> Tensor | None:
        """Logits after the rows, one of each seat that has some; None if the cache has no room for them."""
        spans = [Span(seats[at].slot, len(seats[at].tokens), len(tokens)) for at, tokens in rows.items()]
        if self._cache.make_room(spans):
            return None
        wanted, last = [], -1
        for span in spans:
            last += span.length
            wanted.append(last)
        with self._cache.forward(spans) as forward:
            read = [token if token < self._known else 0 for tokens in rows.values() for token in tokens]
            logits = self._runner.run(forward, read, wanted)
        for at, tokens in rows.items():
            seats[at].tokens += tokens
        return pad(logits, (0, self._vocabulary - logits.shape[-1]), value=-torch.inf)
