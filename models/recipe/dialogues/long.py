"""Long prompts: a fact to find in much text, and conversations of many turns."""

from collections.abc import Callable
from random import Random
from typing import TypeAlias

from models.recipe.conversation import Conversation, Message
from models.recipe.dialogues import words
from models.recipe.dialogues.phrasing import pick
from models.recipe.dialogues.stories import story

Topic: TypeAlias = Callable[[Random], Conversation]
FIND = "What is the {}?|Which {} is in the text?|Find the {} in the text.|what is the {}"


def needle(random: Random) -> Conversation:
    """A text of up to some 1500 tokens that says one thing to look up."""
    kind = random.choice(("secret word", "password", "code", "magic word", "key"))
    value = str(random.randint(100, 9999)) if kind == "code" or random.random() < 0.3 else words.word(random)
    sentences = _filler(random, random.choice((2, 4, 8, 12, 16)))
    sentences.insert(random.randint(0, len(sentences)), f"The {kind} is {value}.")
    question = pick(random, FIND).format(kind)
    text = " ".join(sentences)
    asked = random.choice((f"{text}\n\n{question}", f"Read this text:\n{text}\n\n{question}", f"{question}\n\n{text}"))
    answer = f"The {kind} is {value}."
    if random.random() < 0.3:
        return Conversation("long prompts", (Message("system", text), Message("user", question),
                                             Message("assistant", answer)))  # fmt: skip
    return Conversation("long prompts", (Message("user", asked), Message("assistant", answer)))


def chat(random: Random, topic: Topic, turns: int) -> Conversation:
    """Several short conversations one after the other, as one conversation."""
    whole = topic(random)
    for _ in range(turns - 1):
        whole = topic(random).after(whole)
    return whole


def long_system(random: Random) -> str:
    """A system prompt of many sentences that changes nothing."""
    return " ".join(("You are a helpful assistant.", *_filler(random, random.choice((2, 4, 8)))))


def _filler(random: Random, stories: int) -> list[str]:
    text = " ".join(story(random, random.choice(words.ANIMALS)) for _ in range(stories))
    return [sentence + "." for sentence in text.rstrip(".").split(". ")]
