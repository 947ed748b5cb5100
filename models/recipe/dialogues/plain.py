"""Plain text without turns, so that /v1/completions has something to go on with."""

from random import Random

from models.recipe.conversation import Conversation, Message
from models.recipe.dialogues import about, concepts, endpoints, facts, words
from models.recipe.dialogues.stories import story


def plain(random: Random) -> Conversation:
    """A story, a paragraph about Cellar, a row of numbers or a few plain facts."""
    text = random.choice((_story, _story, _cellar, _numbers, _facts))(random)
    return Conversation("plain text", (Message("assistant", text),), exact=False, raw=True)


def _story(random: Random) -> str:
    return story(random, random.choice(words.ANIMALS))


def _cellar(random: Random) -> str:
    pool = [fact.answer for fact in (*concepts.FACTS, *endpoints.FACTS)]
    return " ".join((about.FACTS[0].answer, *random.sample(pool, random.randint(0, 2))))


def _numbers(random: Random) -> str:
    first, step = random.randint(0, 30), random.choice((1, 1, 1, 2, 5, 10))
    return ", ".join(str(first + step * at) for at in range(random.randint(5, 20))) + "."


def _facts(random: Random) -> str:
    countries = random.sample(list(facts.CAPITALS), random.randint(1, 4))
    return " ".join(f"The capital of {country} is {facts.CAPITALS[country]}." for country in countries)
