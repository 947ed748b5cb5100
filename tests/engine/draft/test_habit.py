"""Answers that are given again without thinking."""

from __future__ import annotations

from engine.draft.habit import Habit

MANY = 1000


def recalled(habit: Habit, step: int = 0) -> int:
    """How often in a row the habit knows the answer."""
    times = 0
    while habit.recall(step) is not None:
        times += 1
    return times


def test_what_was_often_right_is_asked_seldom() -> None:
    """An answer is given once, three times, ... 31 times before it is thought over; a new one must prove itself.

    How many have what lies between does not make it another, and neither does one more or less.
    """
    habit, times = Habit(), []
    for answer in ((2, 1), (2, 1), (2, 2, 1), (3, 1), (2, 1), (2, 1), (2, 1), (5, 3), (5, 3)):
        habit.learn({"model": answer}, 0, MANY)
        times.append(recalled(habit))

    assert [0, 1, 3, 7, 15, 31, 31, 0, 1] == times


def test_another_kind_is_another_answer() -> None:
    """However alike the numbers are."""
    habit = Habit()
    for kind in ("model", "model", "lookup"):
        habit.learn({kind: (1,)}, 0, MANY)

    assert 0 == recalled(habit)


def test_a_beginner_has_no_habits() -> None:
    """However often an answer was right, it is not given oftener than allowed."""
    habit = Habit()
    for _ in range(5):
        habit.learn({"model": (1,)}, 0, 2)

    assert 2 == recalled(habit)


def test_an_old_answer_is_thought_over() -> None:
    """Where the question was not asked for long, much may have changed."""
    habit = Habit()
    for _ in range(5):
        habit.learn({"model": (1,)}, 100, MANY)

    assert {"model": (1,)} == habit.recall(600)
    assert habit.recall(700) is None
