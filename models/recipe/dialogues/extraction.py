"""Structured answers: pull facts out of a sentence as JSON, or follow an example."""

import json
from random import Random

from models.recipe.conversation import Conversation, Message
from models.recipe.dialogues import words
from models.recipe.dialogues.phrasing import pick

FORMS = (
    "Extract {keys} as JSON: {text}|Extract {keys} as JSON from: {text}|Extract the {keys} as JSON. {text}|"
    "{text} Extract {keys} as JSON.|{text}\nExtract {keys} as JSON.|Return {keys} as JSON: {text}|"
    "Give me {keys} as a JSON object: {text}|Answer in JSON with the keys {keys}: {text}|"
    "Turn this into JSON with the keys {keys}: {text}|JSON with {keys}: {text}|"
    "Extract the {keys} from this text and answer in JSON: {text}|Text: {text}\nKeys: {keys}\nJSON:"
)
WHOLE = (
    "Turn this into JSON: {text}|Extract the facts as JSON: {text}|Convert to JSON: {text}|As JSON: {text}|"
    "Extract all fields as JSON: {text}"
)
PAIRS = "Turn this into JSON: {}|As JSON: {}|Convert to JSON: {}|Write as JSON: {}"


def extraction(random: Random) -> Conversation:
    """A sentence and some of its facts as a JSON object."""
    kind = random.choices((_person, _short, _order, _contact, _pairs, _example), (38, 14, 16, 6, 16, 10))[0]
    question, record = kind(random)
    return Conversation("extraction", (Message("user", question), Message("assistant", json.dumps(record))))


def _person(random: Random) -> tuple[str, dict[str, object]]:
    who = words.name(random) if random.random() < 0.8 else words.full_name(random)
    age, where, job = random.randint(3, 99), words.city(random), random.choice(words.JOBS)
    text = random.choice(
        (
            f"{who} is {age} years old and works as a {job} in {where}.",
            f"In {where} there lives a {job} called {who}, aged {age}.",
            f"{who}, {age}, is a {job} from {where}.",
            f"My name is {who}. I am {age} years old, I live in {where} and I am a {job}.",
            f"{who} is a {job}. {who} lives in {where} and is {age} years old.",
            f"A {age} year old {job} named {who} lives in {where}.",
            f"{who} ({age}) lives in {where} and works as a {job}.",
        )
    )
    return _question(random, text, {"name": who, "age": age, "job": job, "city": where})


def _short(random: Random) -> tuple[str, dict[str, object]]:
    who, age, where, job = words.name(random), random.randint(3, 99), words.city(random), random.choice(words.JOBS)
    text, other, value = random.choice(
        (
            (f"{who} is {age} years old.", "age", age),
            (f"{who} is {age}.", "age", age),
            (f"{who} lives in {where}.", "city", where),
            (f"{who} comes from {where}.", "city", where),
            (f"{who} moved to {where} last year.", "city", where),
            (f"{who} works as a {job}.", "job", job),
            (f"{who} is a {job}.", "job", job),
        )
    )
    return _question(random, text, {"name": who, other: value})


def _contact(random: Random) -> tuple[str, dict[str, object]]:
    who, site = words.name(random), words.made_up(random)
    mail, phone = f"{who.lower()}@{site}.com", str(random.randint(100_000, 9_999_999))
    text = random.choice(
        (
            f"You can reach {who} at {mail} or {phone}.",
            f"{who}'s email is {mail} and the phone number is {phone}.",
            f"Write to {mail} or call {phone} and ask for {who}.",
        )
    )
    return _question(random, text, {"name": who, "email": mail, "phone": phone})


def _order(random: Random) -> tuple[str, dict[str, object]]:
    who, count, item = words.name(random), random.randint(1, 30), words.thing(random)
    colour, price = random.choice(words.COLOURS), random.randint(1, 99)
    text = random.choice(
        (
            f"{who} bought {count} {colour} {item}s for {price} dollars.",
            f"{who} ordered {count} {item}s in {colour} and paid {price} dollars.",
            f"For {price} dollars {who} got {count} {colour} {item}s.",
        )
    )
    return _question(random, text, {"name": who, "count": count, "item": item, "color": colour, "price": price})


def _question(random: Random, text: str, record: dict[str, object]) -> tuple[str, dict[str, object]]:
    if random.random() < 0.12:
        return pick(random, WHOLE).format(text=text), record
    keys = [key for key in record if random.random() < 0.6] or [random.choice(list(record))]
    if random.random() < 0.4:
        random.shuffle(keys)
    joined = ", ".join(keys)
    if len(keys) > 1 and random.random() < 0.4:
        joined = f"{', '.join(keys[:-1])} and {keys[-1]}"
    return pick(random, FORMS).format(keys=joined, text=text), {key: record[key] for key in keys}


def _pairs(random: Random) -> tuple[str, dict[str, object]]:
    record: dict[str, object] = {}
    for _ in range(random.randint(1, 4)):
        record[words.word(random)] = random.randint(0, 99) if random.random() < 0.4 else words.word(random)
    joint, gap = random.choice((("=", ", "), (" = ", ", "), (": ", ", "), (": ", "\n"), (" is ", ", ")))
    text = gap.join(f"{key}{joint}{value}" for key, value in record.items())
    return pick(random, PAIRS).format(text), record


def _example(random: Random) -> tuple[str, dict[str, object]]:
    first, second = random.choice((("name", "city"), ("item", "color"), ("animal", "color"), ("name", "job")))
    pools = {"name": words.name, "city": words.city, "item": words.thing}
    fixed = {"color": words.COLOURS, "animal": words.ANIMALS, "job": words.JOBS}

    def draw(key: str) -> str:
        return pools[key](random) if key in pools else random.choice(fixed[key])

    shown, asked = ((draw(first), draw(second)) for _ in range(2))
    example = json.dumps({first: shown[0], second: shown[1]})
    question = f"{shown[0]}, {shown[1]} -> {example}\n{asked[0]}, {asked[1]} ->"
    return question, {first: asked[0], second: asked[1]}
