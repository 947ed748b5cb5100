"""Predictions of waits, from numbers: lower bounds of the time until a first token, and until a place in the queue.

A sequence keeps its slot until it computed its prompt, or until its time slice ends: the least time, since its first
token may be the last one. Only tokens that no other sequence computes for it count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class SlotUse:
    """What a sequence surely does in its slot: compute prompt tokens, unless its time slice ends before.

    slice_seconds  least duration of the rest of its time slice, if that ends inside the prompt
    """

    tokens: int
    slice_seconds: float

    def seconds(self, token_seconds: float) -> float:
        """The least time in the slot."""
        return min(self.tokens * token_seconds, self.slice_seconds)


def slot_seconds(running: Sequence[SlotUse], ahead: Sequence[SlotUse], *, slots: int, token_seconds: float) -> float:
    """The least wait for a slot, after the running sequences and those ahead in the queue, in order.

    The larger of two bounds: each slot is used by one sequence after another; and the prompts of all sequences that
    leave their slots are computed by one machine, less those that lose the slot by a time slice.
    """
    if len(running) < slots:
        return 0.0
    releases = [use.seconds(token_seconds) for use in running]
    heapify(releases)
    for use in ahead:
        heapreplace(releases, releases[0] + use.seconds(token_seconds))
    # The last ones ahead may still be in the other slots, those with the longest prompts in the least case.
    released = sorted(use.tokens for use in ahead)[: max(len(ahead) - slots + 1, 0)]
    computed = [0, *accumulate(released)]
    slice_seconds = min([use.slice_seconds for use in ahead], default=0.0) / slots
    work = min(
        max(tokens * token_seconds, (len(released) - count) * slice_seconds) for count, tokens in enumerate(computed)
    )
    return max(releases[0], work)


def free_place_seconds(
    prompt_tokens: Sequence[int],
    remaining_tokens: Sequence[int],
    *,
    mean_output: float,
    token_seconds: float,
    step_seconds: float,
) -> float:
    """The expected time until one of the running sequences ends, which frees a place in the queue.

    prompt_tokens     uncomputed ones of each running sequence
    remaining_tokens  the most that each may emit
    mean_output       tokens of finished requests
    step_seconds      of a step that computes one token of each
    """
    if not remaining_tokens:
        return 0.0
    steps = min(*remaining_tokens, mean_output / len(remaining_tokens))
    return min(prompt_tokens) * token_seconds + steps * step_seconds
