"""Drafts token by token, for all sequences at once, drawn with the noise that the model's own tokens will have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from engine.draft.seats import Seat
from engine.sample.sampler import sample_tokens
from engine.schedule.draft import Want

# Tokens to read next, by the number of the want.
Rows: TypeAlias = Mapping[int, list[int]]


def unread(wants: Sequence[Want], seats: Sequence[Seat], *, capacity: int, most: int) -> dict[int, list[int]]:
    """The tokens that each seat has to read next, all together no more than `most`."""
    rows, left = {}, most
    for at, (want, seat) in enumerate(zip(wants, seats, strict=True)):
        tokens = list(want.tokens[len(seat.tokens) : len(seat.tokens) + left])
        if tokens and len(want.tokens) + want.limit <= capacity:
            rows[at] = tokens
            left -= len(tokens)
    return rows


def chain(
    wants: Sequence[Want], seats: Sequence[Seat], rows: Rows, read: Callable[[Rows], Tensor | None]
) -> list[list[int]]:
    """For each want what is said behind its text; nothing where its seat still has to read most of that.

    rows  what each seat reads first
    read  lets seats read rows, and gives the logits behind each of them; None: there is no room
    """
    drafts: list[list[int]] = [[] for _ in wants]
    while rows:
        logits = read(rows)
        going = [at for at in rows if _goes_on(wants[at], seats[at], drafts[at])]
        if logits is None or not going:
            break
        behind = [row for row, at in enumerate(rows) if at in going]
        said = sample_tokens(logits[behind], [wants[at].draw.after(drafts[at]) for at in going])
        found = {at: [token] for at, token in zip(going, said, strict=True) if token is not None}
        for at, tokens in found.items():
            drafts[at] += tokens
        # The last draft is known; its own row would only be computed for the next one.
        rows = {at: tokens for at, tokens in found.items() if len(drafts[at]) < wants[at].limit}
    return drafts


def _goes_on(want: Want, seat: Seat, draft: Sequence[int]) -> bool:
    """Whether a seat has read all of its text and its draft, so that its logits tell the next token."""
    return len(draft) < want.limit and len(seat.tokens) == len(want.tokens) + len(draft)
