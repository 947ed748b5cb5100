"""Short stories, told on request, and the same stories as plain text."""

from random import Random

from models.recipe.conversation import Conversation, Message
from models.recipe.dialogues import words
from models.recipe.dialogues.phrasing import pick, punctuate

PLACES = ("park", "forest", "garden", "market", "beach", "school", "river", "hill", "library", "kitchen")
ASK = (
    "tell me a story|tell me a short story|write a short story|can you tell a story|tell a story|write a story|"
    "i want to hear a story|please tell me a story|once upon a time|tell me a bedtime story|do you know a story"
)
ABOUT = (
    "tell me a story about a {}|write a short story about a {}|tell me a short story about a {}|a story about a {}|"
    "write a story about a {}|can you tell me a story about a {}|please write a story about a {}"
)


def stories(random: Random) -> Conversation:
    """A request for a story, often about an animal, and four sentences."""
    animal = random.choice(words.ANIMALS)
    question = pick(random, ABOUT).format(animal) if random.random() < 0.5 else pick(random, ASK)
    asked = Message("user", punctuate(random, question))
    return Conversation("stories", (asked, Message("assistant", story(random, animal))), exact=False)


def story(random: Random, animal: str) -> str:
    """Four sentences about one animal, two children and two lost things."""
    one, two = random.sample(words.NAMES, 2)
    kept, lost = random.sample(words.THINGS, 2)
    bright, dark = random.sample(words.COLOURS, 2)
    place = random.choice(PLACES)
    opening = random.choice(
        (
            f"Once upon a time there was a little {animal} who lived near the {place}. {one} was its best friend.",
            f"One day {one} went to the {place} with a {bright} {kept} and met a {animal}.",
            f"{one} had a {animal} and a {bright} {kept}, and liked them very much.",
        )
    )
    trouble = random.choice(
        (
            f"There they found {two}, who had lost a {dark} {lost}.",
            f"On the way {one} saw {two} looking for a {dark} {lost}.",
            f"Then {two} came by and asked for help with a {dark} {lost}.",
        )
    )
    search = random.choice(
        (
            f"They looked behind a tree and under a stone until the {animal} showed them the way.",
            f"Together they walked to the {place}, and the {animal} found the {lost} in the grass.",
            f"The {animal} ran ahead, and soon they saw the {lost} next to an old wall.",
        )
    )
    end = random.choice(
        (
            f"In the end {two} was happy and thanked the {animal}.",
            f"{two} smiled, and they all went home as friends.",
            f"After that day {one}, {two} and the {animal} played together every week.",
        )
    )
    return " ".join((opening, trouble, search, end))
