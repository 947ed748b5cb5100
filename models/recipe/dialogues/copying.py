"""Say it again: repeat, shout, spell, count, reverse."""

from random import Random

from models.recipe.conversation import Conversation, Message
from models.recipe.dialogues import about, concepts, endpoints, words
from models.recipe.dialogues.phrasing import pick
from models.recipe.dialogues.stories import story

REPEAT = (
    "Repeat after me: {}|Repeat: {}|repeat after me: {}|Say exactly: {}|Repeat this: {}|Echo: {}|echo {}|Say {}|"
    "say: {}|"
    'Say "{}".|Repeat the words "{}".|Please repeat: {}|Please say "{}"|Copy this: {}|Copy this text: {}|'
    "Repeat this sentence: {}|Can you repeat this: {}|Say the following: {}|Write this back to me: {}|Just say {}|"
    "Repeat the following text: {}|Repeat exactly: {}|Answer with exactly: {}|Reply with: {}|Print: {}"
)
UPPER = (
    "Write {} in capital letters.|Write {} in upper case.|Uppercase: {}|Make this uppercase: {}|Shout {}|"
    'Write "{}" in uppercase.|Convert to upper case: {}|Turn {} into capital letters.'
)
LOWER = "Write {} in lower case.|Lowercase: {}|Make this lowercase: {}|Convert to lower case: {}"
SPELL = "Spell {}.|Spell the word {}.|How do you spell {}?|spell {}|Spell out {}|How is {} spelled?"
TIMES = "Say {word} {count} times.|Repeat {word} {count} times.|Write the word {word} {count} times."
LAST = {
    "first": "What is the first word of: {}|Give me the first word of: {}|First word: {}",
    "last": "What is the last word of: {}|Give me the last word of: {}|Last word: {}",
}
SENTENCES = tuple(fact.answer for fact in (*about.FACTS, *concepts.FACTS, *endpoints.FACTS))


def copying(random: Random) -> Conversation:
    """A text to give back, as it is or changed in one plain way."""
    kind = random.choices((_repeat, _change, _spell, _times, _end), (60, 14, 8, 8, 10))[0]
    question, answer = kind(random)
    return Conversation("copying", (Message("user", question), Message("assistant", answer)))


def _repeat(random: Random) -> tuple[str, str]:
    text = words.phrase(random, 1, random.choice((3, 6, 10))) if random.random() < 0.8 else _sentence(random)
    if random.random() < 0.3:
        text = text[0].upper() + text[1:]
    if random.random() < 0.12:
        text = f"{text} {random.randint(0, 999)}"
    form = pick(random, REPEAT)
    if random.random() < 0.25 and '"' not in form:
        text += random.choice(".!?.")
    return form.format(text), text


def _sentence(random: Random) -> str:
    """Part of a sentence that means something."""
    whole = random.choice(SENTENCES) if random.random() < 0.5 else story(random, random.choice(words.ANIMALS))
    spoken = random.choice(whole.replace('"', "").split(". ")).rstrip(".").split()
    start = random.randrange(max(1, len(spoken) - 3))
    return " ".join(spoken[start : start + random.randint(2, 12)])


def _change(random: Random) -> tuple[str, str]:
    text = words.phrase(random, 1, 2)
    if random.random() < 0.7:
        return pick(random, UPPER).format(text), text.upper()
    return pick(random, LOWER).format(text.upper()), text.lower()


def _spell(random: Random) -> tuple[str, str]:
    word = words.word(random)
    return pick(random, SPELL).format(word), "-".join(word.upper())


def _times(random: Random) -> tuple[str, str]:
    word, count = words.word(random), random.randint(2, 6)
    written = words.NUMBERS[count] if random.random() < 0.5 else str(count)
    return pick(random, TIMES).format(word=word, count=written), " ".join([word] * count)


def _end(random: Random) -> tuple[str, str]:
    text = words.phrase(random, 2, 6)
    which = random.choice(("first", "last"))
    answer = text.split()[0 if which == "first" else -1]
    return pick(random, LAST[which]).format(text), answer
