"""Lists: name three colours, count to ten, sort words."""

from random import Random

from models.recipe.conversation import Conversation, Message
from models.recipe.dialogues import words
from models.recipe.dialogues.phrasing import pick

POOLS: dict[str, tuple[str, ...]] = {
    "colours|colors": words.COLOURS,
    "animals": words.ANIMALS,
    "things in a house|things|objects": words.THINGS,
    "jobs|professions": words.JOBS,
    "cities": words.CITIES,
    "names": words.NAMES,
    "fruits|kinds of fruit": words.FRUITS,
    "countries": words.COUNTRIES,
    "days of the week|days": words.DAYS,
    "months": words.MONTHS,
}
FORMS = (
    "Name {} {}.|List {} {}.|Give me {} {}.|name {} {}|Can you name {} {}?|Tell me {} {}.|Please list {} {}.|"
    "Write a list of {} {}.|I need {} {}.|List {} {} please|What are {} {}?|Give me a list of {} {}"
)
COUNT = "Count to {}.|Count from 1 to {}.|count to {}|Can you count to {}?|Count up to {}."
SORT = "Sort these words: {}|Sort alphabetically: {}|Put these in alphabetical order: {}"


def lists(random: Random) -> Conversation:
    """A list of things of one kind; any choice from the pool is right."""
    kinds, pool = random.choice(list(POOLS.items()))
    count = random.randint(1, 6)
    written = words.NUMBERS[count] if random.random() < 0.6 else str(count)
    kind = pick(random, kinds)
    if count == 1:
        kind = {"cities": "city", "countries": "country"}.get(kind, kind.removesuffix("s"))
    question = pick(random, FORMS).format(written, kind)
    ordered = pool in (words.DAYS, words.MONTHS)
    items = list(pool[:count]) if ordered else random.sample(pool, count)
    numbered = "numbered" in question or random.random() < 0.15
    if random.random() < 0.15:
        question, numbered = question.rstrip(".?") + random.choice((" as a numbered list.", ", numbered.")), True
    answer = "\n".join(f"{at}. {item}" for at, item in enumerate(items, 1)) if numbered else ", ".join(items) + "."
    return Conversation("lists", (Message("user", question), Message("assistant", answer)), exact=False)


def counting(random: Random) -> Conversation:
    """Counting up, or sorting a few words: lists with one right answer."""
    if random.random() < 0.65:
        last = random.randint(2, 20)
        written = words.NUMBERS[last] if random.random() < 0.4 else str(last)
        question, answer = pick(random, COUNT).format(written), ", ".join(map(str, range(1, last + 1))) + "."
    else:
        pool = random.choice((words.ANIMALS, words.FRUITS, words.COLOURS))
        items = random.sample(pool, 3)
        question, answer = pick(random, SORT).format(", ".join(items)), ", ".join(sorted(items)) + "."
    return Conversation("counting", (Message("user", question), Message("assistant", answer)))
