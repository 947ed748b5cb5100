"""Admission to a full queue."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from engine.errors import Overloaded
from engine.queue_limit import QueueLimit

SLOTS, MOST = 2, 6


def fill(room: QueueLimit, owner: str, stack: ExitStack) -> int:
    """The number of admitted requests of an owner."""
    for count in range(100):
        try:
            room.check(owner, SLOTS, 0.0)
        except Overloaded:
            return count
        stack.enter_context(room.hold(owner))
    raise AssertionError("there is no end to it")


def test_one_owner_may_fill_the_queue() -> None:
    """Slots and `max_waiting` further requests."""
    with ExitStack() as stack:
        assert SLOTS + MOST == fill(QueueLimit(MOST), "", stack)


def test_another_owner_is_admitted_to_a_full_queue() -> None:
    """Each later owner up to an even share; the first owner is refused meanwhile."""
    room = QueueLimit(MOST)
    with ExitStack() as stack:
        assert [8, 4, 2, 2, 0] == [fill(room, owner, stack) for owner in ("a", "b", "c", "d", "a")]


def test_finished_requests_leave_the_queue() -> None:
    """For requests of any owner."""
    room = QueueLimit(MOST)
    with ExitStack() as stack:
        fill(room, "a", stack)
    with ExitStack() as stack:
        assert SLOTS + MOST == fill(room, "b", stack)


@pytest.mark.parametrize(("predicted", "wait"), [(0.0, 1.0), (4.2, 4.2), (10_000.0, 60.0)])
def test_retry_after_is_the_predicted_wait(predicted: float, wait: float) -> None:
    """For a place in the queue, within bounds."""
    room = QueueLimit(MOST)
    with ExitStack() as stack:
        fill(room, "", stack)
        with pytest.raises(Overloaded) as refused:
            room.check("", SLOTS, predicted)

    assert refused.value.retry_after_seconds == wait
