"""Small sums, differences, products and comparisons."""

from random import Random

from models.recipe.conversation import Conversation, Message
from models.recipe.dialogues.phrasing import pick
from models.recipe.dialogues.words import NUMBERS

FORMS = (
    "What is {}?|what is {}|What's {}?|Compute {}.|Calculate {}|{} = ?|{}=|{}|How much is {}?|how much is {}|{}?|"
    "Please compute {}.|Can you add up {}?|What does {} make?|Solve {}|Do you know what {} is?|Can you tell me {}?|"
    "Hi, what is {}?|Please tell me what {} is|Work out {}.|"
    "Tell me what {} is.|What is the result of {}?"
)
SPOKEN = {"+": "plus|+|and", "-": "minus|-", "*": "times|x|*|multiplied by"}


def arithmetic(random: Random) -> Conversation:
    """One sum with its answer written out, for example `7 + 8 = 15.`"""
    if random.random() < 0.08:
        return _comparison(random)
    sign = random.choice("+++--*")
    left, right = _operands(random, sign)
    value = {"+": left + right, "-": left - right, "*": left * right}[sign]
    question = pick(random, FORMS).format(_expression(random, left, sign, right))
    answer = f"{left} {sign} {right} = {value}."
    return Conversation("arithmetic", (Message("user", question), Message("assistant", answer)))


def _operands(random: Random, sign: str) -> tuple[int, int]:
    if sign == "*":
        return random.randint(0, 10), random.randint(0, 10)
    roll = random.random()
    most = 10 if roll < 0.45 else 20 if roll < 0.75 else 99
    left, right = random.randint(0, most), random.randint(0, most)
    return (max(left, right), min(left, right)) if sign == "-" else (left, right)


def _expression(random: Random, left: int, sign: str, right: int) -> str:
    if random.random() < 0.65:
        gap = random.choice((" ", " ", " ", ""))
        return f"{left}{gap}{sign}{gap}{right}"
    spoken = pick(random, SPOKEN[sign])
    if max(left, right) <= 20 and random.random() < 0.4:
        return f"{NUMBERS[left]} {spoken} {NUMBERS[right]}"
    return f"{left} {spoken} {right}"


def _comparison(random: Random) -> Conversation:
    left, right = random.sample(range(100), 2)
    question, answer = random.choice(
        (
            (f"Which is larger, {left} or {right}?", f"{max(left, right)} is larger."),
            (f"Which is smaller, {left} or {right}?", f"{min(left, right)} is smaller."),
            (f"Which number is bigger: {left} or {right}?", f"{max(left, right)} is larger."),
        )
    )
    return Conversation("arithmetic", (Message("user", question), Message("assistant", answer)))
