"""Answers that are given again without thinking."""

from __future__ import annotations

from engine.draft.habit import Habit


def recalled(habit: Habit, question: str) -> int:
    """How often in a row the habit knows the answer."""
    times = 0
    while habit.recall(question) is not None:
        times += 1
    return times


def test_what_was_often_right_is_asked_seldom() -> None:
    """An answer is given once, three times, seven times before it is thought over; a new one must prove itself.

    How many have what lies between does not make it another.
    """
    habit, times = Habit(), []
    for answer in ((2, 1), (2, 1), (2, 2, 1), (2, 1), (2, 1), (4, 3), (4, 3)):
        habit.learn("who", {"model": answer})
        times.append(recalled(habit, "who"))

    assert [0, 1, 3, 7, 7, 0, 1] == times


def test_another_question_is_thought_over() -> None:
    """What was learnt of one question is no answer to another."""
    habit = Habit()
    for _ in range(3):
        habit.learn("who", {"model": (1,)})

    assert habit.recall("when") is None
    assert {"model": (1,)} == habit.recall("who")


def test_an_exception_is_no_habit() -> None:
    """It is given as often as was said, and then one thinks, and begins anew."""
    habit = Habit()
    for _ in range(4):
        habit.learn("who", {"model": (1,)})
    habit.learn("who", {"model": (5,)})
    habit.hold(2)

    assert 2 == recalled(habit, "who")
    habit.learn("who", {"model": (1,)})
    assert 0 == recalled(habit, "who")
