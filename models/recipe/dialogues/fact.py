"""The shape of what Cellar's own topics teach: questions, one answer, follow-up questions."""

from dataclasses import dataclass
from random import Random

from models.recipe.conversation import Conversation, Message
from models.recipe.dialogues.phrasing import ask, pick


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing to know.

    questions  ways to ask, split by bars
    answer     the one answer
    follow     pairs of questions, which lean on this answer, and their answers
    """

    questions: str
    answer: str
    follow: tuple[tuple[str, str], ...] = ()


def converse(random: Random, topic: str, fact: Fact, question: str) -> Conversation:
    """The question and its answer, in half the cases with a follow-up where there is one."""
    turns = [Message("user", ask(random, question)), Message("assistant", fact.answer)]
    if fact.follow and random.random() < 0.5:
        questions, answer = random.choice(fact.follow)
        turns += [Message("user", ask(random, pick(random, questions))), Message("assistant", answer)]
    return Conversation(topic, tuple(turns))
