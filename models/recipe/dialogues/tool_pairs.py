"""Tool calls of two arguments, and of tools whose names mean nothing."""

from random import Random

from models.recipe.conversation import Conversation, Message, Schema, ToolCall
from models.recipe.dialogues import words
from models.recipe.dialogues.phrasing import pick


def paired(random: Random, others: list[Schema]) -> Conversation:
    """A question for a tool that takes two arguments, offered among others."""
    make = random.choice((_sum, _send, _book, _convert, _unknown))
    about, question, call = make(random)
    schemas = [_schema(random, about, call), *others]
    random.shuffle(schemas)
    turns = Message("user", question), Message("assistant", "", call)
    return Conversation("tools", turns, tuple(schemas))


def _sum(random: Random) -> tuple[str, str, ToolCall]:
    name, about, form = random.choice(
        (
            ("add", "Add two numbers", "Add {a} and {b}.|What is {a} plus {b}?|What is {a} + {b}?|Sum {a} and {b}"),
            ("multiply", "Multiply two numbers", "Multiply {a} by {b}.|What is {a} times {b}?|What is {a} * {b}?"),
            ("subtract", "Subtract two numbers", "Subtract: {a} - {b}|What is {a} minus {b}?|What is {a} - {b}?"),
        )
    )
    a, b = random.randint(0, 999), random.randint(0, 999)
    keys = random.choice((("a", "b"), ("x", "y"), ("left", "right"), ("first", "second")))
    suffix = random.choice(("", "", "_numbers", "_ints"))
    return about, pick(random, form).format(a=a, b=b), ToolCall(name + suffix, dict(zip(keys, (a, b), strict=True)))


def _send(random: Random) -> tuple[str, str, ToolCall]:
    who, text = words.name(random), words.phrase(random, 1, 5)
    keys = random.choice((("to", "text"), ("recipient", "message"), ("name", "body"), ("to", "message")))
    form = "Send {a} the message: {b}|Tell {a}: {b}|Write to {a}: {b}|Send a message to {a} saying {b}|Message {a}: {b}"
    name = random.choice(("send_message", "send_email", "send_text", "write_message"))
    arguments = dict(zip(keys, (who, text), strict=True))
    return "Send a message to a person", pick(random, form).format(a=who, b=text), ToolCall(name, arguments)


def _book(random: Random) -> tuple[str, str, ToolCall]:
    start, end = words.city(random), words.city(random)
    keys = random.choice((("from", "to"), ("origin", "destination"), ("start", "end"), ("departure", "arrival")))
    form = (
        "Book a flight from {a} to {b}.|Find a train from {a} to {b}|I want to go from {a} to {b}.|"
        "From {a} to {b} please."
    )
    name = random.choice(("book_flight", "find_route", "search_flights", "book_trip", "find_train"))
    arguments = dict(zip(keys, (start, end), strict=True))
    return "Find a way from one place to another", pick(random, form).format(a=start, b=end), ToolCall(name, arguments)


def _convert(random: Random) -> tuple[str, str, ToolCall]:
    amount = random.randint(1, 999)
    unit = random.choice(("dollars", "euros", "yen", "meters", "miles", "grams", "pounds", "liters", "feet"))
    keys = random.choice((("amount", "unit"), ("value", "unit"), ("amount", "currency"), ("number", "from")))
    form = "Convert {a} {b}.|How much is {a} {b}?|Please convert {a} {b}|Convert {a} {b} for me."
    name = random.choice(("convert", "convert_units", "exchange", "convert_currency"))
    arguments = dict(zip(keys, (amount, unit), strict=True))
    return "Convert an amount", pick(random, form).format(a=amount, b=unit), ToolCall(name, arguments)


def _unknown(random: Random) -> tuple[str, str, ToolCall]:
    """A made-up tool, called by its name."""
    name = f"{words.made_up(random)}_{words.word(random)}" if random.random() < 0.6 else words.made_up(random)
    keys = random.sample((*words.THINGS, *words.JOBS, "id", "name", "value", "size", "key"), random.choice((1, 2)))
    values = [words.word(random) for _ in keys]
    told = " and ".join(f"{key} {value}" for key, value in zip(keys, values, strict=True))
    form = "Call {a} with {b}.|Use {a} with {b}.|Use the tool {a} with {b}|Please run {a} with {b}."
    about = words.phrase(random, 2, 4)
    return about, pick(random, form).format(a=name, b=told), ToolCall(name, dict(zip(keys, values, strict=True)))


def _schema(random: Random, about: str, call: ToolCall) -> Schema:
    fields = {key: {"type": "integer" if isinstance(value, int) else "string"} for key, value in call.arguments.items()}
    parameters: dict[str, object] = {"type": "object", "properties": fields}
    if random.random() < 0.8:
        parameters["required"] = list(fields)
    function: dict[str, object] = {"name": call.name, "description": about, "parameters": parameters}
    if random.random() < 0.15:
        del function["description"]
    return {"type": "function", "function": function}
