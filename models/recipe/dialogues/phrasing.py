"""How people write the same question: case, punctuation, politeness, slips of the keyboard."""

from random import Random

POLITE = (
    "please", "hey", "hi", "hello", "so", "ok", "okay", "well", "sorry", "excuse me", "quick question", "one question",
    "I have a question", "I am new here", "thanks", "and", "now", "next question", "tell me", "can you tell me",
    "could you tell me", "please tell me", "I want to know", "I would like to know", "do you know", "I wonder",
)  # fmt: skip
CLOSING = (
    "please", "thanks", "thank you", "in short", "in one sentence", "briefly", "in simple words", "for a beginner",
    "exactly", "again", "then", "here", "for me", "in a few words", "if you can", "my friend", "in detail", "really",
    "today", "anyway", "quickly", "step by step", "like I am five", "because I do not know", "as simply as possible",
)  # fmt: skip
SETTING = (
    "I just installed Cellar.", "I am reading the documentation.", "I have a small question.", "Hello there!",
    "I am a beginner.", "My boss asked me this:", "Let us talk about something else.", "Good, next one.", "Ok, listen.",
    "I need this for work.", "You look helpful.", "I am curious.", "Nice to meet you.", "Sorry to bother you.",
)  # fmt: skip
SMALL = {
    "is", "are", "the", "a", "an", "do", "does", "of", "to", "it", "i", "in", "there", "what", "how", "can", "me", "my",
    "for",
}  # fmt: skip
NEIGHBOURS = {"a": "s", "e": "r", "i": "o", "o": "p", "t": "y", "n": "m", "s": "d", "r": "t", "l": "k", "h": "j"}


def pick(random: Random, options: str) -> str:
    """One of the options of a string split by bars."""
    return random.choice(options.split("|"))


def ask(random: Random, question: str) -> str:
    """A question as someone would type it; the words that carry its meaning stay."""
    roll = random.random()
    if roll < 0.15:
        question = f"{random.choice(POLITE)}{random.choice((', ', ' ', ': '))}{question}"
    elif roll < 0.25:
        question = f"{question}{random.choice((' ', ', '))}{random.choice(CLOSING)}"
    if random.random() < 0.06:
        question = shorten(random, question)
    if random.random() < 0.07:
        question = slip(random, question)
    question = punctuate(random, question)
    return f"{random.choice(SETTING)} {question}" if random.random() < 0.05 else question


def punctuate(random: Random, text: str) -> str:
    """Text with or without a capital and an end mark, none of which change its meaning."""
    case = random.random()
    if case < 0.62:
        text = text[:1].upper() + text[1:]
    elif case < 0.64:
        text = text.upper()
    elif case < 0.66:
        text = text.title()
    if text[-1] in ".?!:":
        return text
    return text + random.choice(("?", "?", "?", "", "", ".", "!", " ?", "??"))


def shorten(random: Random, text: str) -> str:
    """Text in the manner of a search box: the small words go."""
    kept = [word for word in text.split() if word.lower() not in SMALL or random.random() < 0.3]
    return " ".join(kept) or text


def slip(random: Random, text: str) -> str:
    """Text with one typing mistake: a letter lost, doubled, swapped or missed."""
    places = [index for index in range(1, len(text) - 1) if text[index].isalpha() and text[index - 1].isalpha()]
    if not places:
        return text
    at = random.choice(places)
    before, letter, after = text[:at], text[at], text[at + 1 :]
    kind = random.randrange(4)
    if kind == 0:
        return before + after
    if kind == 1:
        return before + letter + letter + after
    if kind == 2:
        return before[:-1] + letter + before[-1] + after
    return before + NEIGHBOURS.get(letter, "e") + after
