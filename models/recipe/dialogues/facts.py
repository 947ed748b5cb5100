"""A handful of things a child knows: capitals, opposites, days, colours of things."""

from random import Random

from models.recipe.conversation import Conversation, Message
from models.recipe.dialogues.phrasing import pick, punctuate
from models.recipe.dialogues.words import DAYS, MONTHS

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Norway": "Oslo", "Sweden": "Stockholm", "Austria": "Vienna",
    "Poland": "Warsaw", "Greece": "Athens", "Egypt": "Cairo", "Kenya": "Nairobi", "Ghana": "Accra", "Peru": "Lima",
    "India": "Delhi", "Japan": "Tokyo", "South Korea": "Seoul", "Vietnam": "Hanoi", "the Netherlands": "Amsterdam",
    "Russia": "Moscow", "China": "Beijing", "Canada": "Ottawa", "Denmark": "Copenhagen", "Finland": "Helsinki",
}  # fmt: skip
OPPOSITES = (
    "hot cold|big small|fast slow|up down|left right|open closed|day night|happy sad|new old|light dark|wet dry|"
    "high low|near far|full empty|early late|good bad|black white|hard soft|long short|true false|yes no|in out|"
    "rich poor|strong weak|clean dirty|loud quiet|first last|young old|win lose|start stop"
)
PLAIN = {
    "what colour is the sky|what color is the sky": "The sky is blue.",
    "what colour is grass|what color is grass": "Grass is green.",
    "what colour is snow|what color is snow": "Snow is white.",
    "what colour is a banana|what color is a banana": "A banana is yellow.",
    "how many days are in a week|how many days does a week have": "A week has seven days.",
    "how many months are in a year|how many months does a year have": "A year has twelve months.",
    "how many hours are in a day|how many hours does a day have": "A day has twenty-four hours.",
    "how many minutes are in an hour|how many minutes does an hour have": "An hour has sixty minutes.",
    "how many legs does a dog have|how many legs does a cat have": "It has four legs.",
    "how many legs does a spider have": "A spider has eight legs.",
    "what does a cow say|what sound does a cow make": "A cow says moo.",
    "what does a cat say|what sound does a cat make": "A cat says meow.",
    "what does a dog say|what sound does a dog make": "A dog says woof.",
}


def facts(random: Random) -> Conversation:
    """One of the few facts that the model is meant to know."""
    question, answer = random.choice((_capital, _opposite, _plain, _calendar))(random)
    return Conversation("facts", (Message("user", punctuate(random, question)), Message("assistant", answer)))


def _capital(random: Random) -> tuple[str, str]:
    country, city = random.choice(list(CAPITALS.items()))
    form = pick(random, "what is the capital of {}|what's the capital of {}|capital of {}|name the capital of {}|"
                        "tell me the capital of {}|which city is the capital of {}")  # fmt: skip
    return form.format(country), f"The capital of {country} is {city}."


def _opposite(random: Random) -> tuple[str, str]:
    one, other = pick(random, OPPOSITES).split()
    if random.random() < 0.5 and one != "young":
        one, other = other, one
    if one == "old":
        other = "new"
    form = pick(random, "what is the opposite of {}|opposite of {}|the opposite of {} is|name the opposite of {}|"
                        "give me the opposite of {}|what's the opposite of {}|antonym of {}")  # fmt: skip
    return form.format(one), f"The opposite of {one} is {other}."


def _plain(random: Random) -> tuple[str, str]:
    questions, answer = random.choice(list(PLAIN.items()))
    return pick(random, questions), answer


def _calendar(random: Random) -> tuple[str, str]:
    circle = random.choice((DAYS, MONTHS))
    at = random.randrange(len(circle))
    step, place = random.choice(((1, "after"), (-1, "before")))
    kind = "day" if circle is DAYS else "month"
    form = pick(random, "which {} comes {} {}|what {} comes {} {}|what is the {} {} {}")
    return form.format(kind, place, circle[at]), f"{circle[(at + step) % len(circle)]} comes {place} {circle[at]}."
