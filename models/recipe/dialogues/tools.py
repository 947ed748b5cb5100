"""Tool calls: choose one of the offered tools, fill its arguments, report what it returned."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from models.recipe.conversation import Conversation, Message, Schema, ToolCall
from models.recipe.dialogues import words
from models.recipe.dialogues.phrasing import pick, punctuate
from models.recipe.dialogues.small_talk import REPLY_HELLO, hello
from models.recipe.dialogues.tool_pairs import paired

Draw: TypeAlias = Callable[[Random], str]


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of tools that do one thing under several names.

    names, keys   ways to call the tool and its argument, split by bars
    asks          how a user asks for it; {} is the argument
    result, told  what the tool returns and what the model says of it; {value} is the argument, {x} a drawn word
    """

    names: str
    about: str
    keys: str
    draw: Draw
    asks: str
    result: str
    told: str
    drawn: Draw


def _sky(random: Random) -> str:
    return random.choice(("sunny", "cloudy", "rainy", "windy", "foggy", "clear"))


def _clock(random: Random) -> str:
    return f"{random.randint(0, 23)}:{random.randint(10, 59)}"


def _number(random: Random) -> str:
    return str(random.randint(0, 99))


def _sum(random: Random) -> str:
    return f"{random.randint(0, 99)} {random.choice('+-*')} {random.randint(0, 99)}"


def _colour(random: Random) -> str:
    return random.choice(words.COLOURS)


def _words(random: Random) -> str:
    return words.phrase(random, 1, 4)


def _job(random: Random) -> str:
    return random.choice(words.JOBS)


def _file(random: Random) -> str:
    return words.made_up(random) + random.choice((".txt", ".py", ".md", ".json"))


KINDS = (
    Kind("get_weather|weather|get_current_weather|lookup_weather|fetch_weather", "Get the weather for a city",
         "city|location|place|town", words.city,
         "What is the weather in {}?|How is the weather in {} today?|Weather in {} please.|"
         "What's the weather like in {}?|"
         "Is it raining in {}?|weather in {}|Tell me the weather in {}.|what is the weather in {}",
         '{{"sky": "{x}"}}', "The weather in {value} is {x}.", _sky),
    Kind("get_temperature|temperature|read_temperature", "Get the temperature in a city",
         "city|location|place", words.city,
         "How warm is it in {}?|What is the temperature in {}?|How cold is it in {}?|temperature in {}|"
         "How hot is it in {}?",
         '{{"celsius": {x}}}', "It is {x} degrees in {value}.", _number),
    Kind("get_time|current_time|local_time|get_local_time|clock", "Get the local time in a city",
         "city|location|place|zone", words.city,
         "What time is it in {}?|Tell me the time in {}.|time in {}|What is the local time in {}?|"
         "what time is it in {}",
         '{{"time": "{x}"}}', "It is {x} in {value}.", _clock),
    Kind("find_person|lookup_person|search_people|find_user", "Look up a person",
         "name|person|who|user", words.name,
         "Find {} for me.|Look up {}.|Find the person {}.|Look up the person {} please.|Search for the person {}",
         '{{"job": "{x}"}}', "{value} is a {x}.", _job),
    Kind("buy_item|order|order_item|buy|purchase", "Buy an item",
         "item|product|thing|article", words.thing,
         "Buy a {}.|Please order a {} for me.|I need a {}.|Order a {}|I want to buy a {}.|Get me a {} please.",
         '{{"ok": true, "price": {x}}}', "Done, I have ordered a {value} for {x} dollars.", _number),
    Kind("set_light|set_color|change_light|light", "Set the colour of the light",
         "color|colour|value", _colour,
         "Make the light {}.|Set the light to {}.|Turn the light {}.|I want {} light.|Change the light to {} please.",
         '{{"ok": true}}', "The light is now {value}.", _colour),
    Kind("calculate|calculator|compute|evaluate|math", "Compute a sum",
         "expression|formula|input|sum", _sum,
         "Compute {}.|What is {}?|Calculate {}|Use the calculator: {}|How much is {}?|"
         "Please calculate {} with the tool.",
         '{{"result": {x}}}', "The result is {x}.", _number),
    Kind("search|web_search|search_web|find|google", "Search the web",
         "query|text|q|terms", _words,
         "Search for {}.|Search the web for {}|Find pages about {}.|Look on the web for {}|search {}",
         '{{"title": "{x}"}}', "I found a page called {x}.", words.word),
    Kind("play_music|play|play_song|music", "Play a song",
         "song|title|track|name", _words,
         "Play {}.|Play the song {}|I want to hear {}.|Put on {} please.|play {}",
         '{{"ok": true}}', "Now playing {value}.", _colour),
    Kind("send_message|message|notify|send_text", "Send a message to a person",
         "to|recipient|name|person", words.name,
         "Send a message to {}.|Message {}.|Write to {} please.|Notify {}|Text {} for me.",
         '{{"sent": true}}', "The message to {value} was sent.", _colour),
    Kind("read_file|open_file|load_file|cat", "Read a file",
         "path|file|filename|name", _file,
         "Read {}.|Open the file {}.|Show me {}|What is in {}?|Load the file {} please.",
         '{{"text": "{x}"}}', "The file {value} says: {x}", words.word),
    Kind("translate|translate_text|translator", "Translate a text",
         "text|sentence|input", _words,
         "Translate: {}|Translate {} please.|How do you say {} in French?|Translate the words {}",
         '{{"translation": "{x}"}}', "The translation is {x}.", words.made_up),
    Kind("get_stock_price|stock_price|get_price|price", "Get the price of a stock or a thing",
         "symbol|ticker|name|item", words.made_up,
         "What is the price of {}?|How much does {} cost?|Price of {}|Get the price of {}.|Stock price of {} please.",
         '{{"price": {x}}}', "The price of {value} is {x} dollars.", _number),
    Kind("set_timer|timer|start_timer|set_alarm", "Set a timer in minutes",
         "minutes|duration|time|length", _number,
         "Set a timer for {} minutes.|Timer {} minutes|Wake me in {} minutes.|Start a timer of {} minutes please.",
         '{{"ok": true}}', "The timer is set for {value} minutes.", _number),
)  # fmt: skip


# Arguments that a tool may take and no question asks for.
EXTRAS: dict[str, Schema] = {
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    "units": {"type": "string", "enum": ["metric", "imperial"]},
    "language": {"type": "string"},
    "limit": {"type": "integer", "description": "How many results"},
    "format": {"type": "string", "enum": ["json", "text"]},
    "verbose": {"type": "boolean"},
}


def tools(random: Random) -> Conversation:
    """A question that one of the offered tools answers, up to its call or its report."""
    if random.random() < 0.2:
        return paired(random, [_offer(random, kind) for kind in random.sample(KINDS, random.choice((0, 1, 1, 2)))])
    offered = random.sample(KINDS, random.choice((1, 1, 2, 2, 3)))
    named = [(kind, pick(random, kind.names), pick(random, kind.keys)) for kind in offered]
    schemas = tuple(_schema(random, kind, name, key) for kind, name, key in named)
    if random.random() < 0.1:
        greeting = Message("user", hello(random)), Message("assistant", REPLY_HELLO)
        return Conversation("tools", greeting, schemas)
    kind, name, key = random.choice(named)
    value = kind.draw(random)
    argument = int(value) if value.isdigit() else value
    asked = Message("user", _question(random, kind, value))
    called = Message("assistant", "", ToolCall(name, {key: argument}))
    if random.random() < 0.65:
        return Conversation("tools", (asked, called), schemas)
    drawn = kind.drawn(random)
    returned = kind.result.format(value=value, x=drawn)
    told = Message("assistant", kind.told.format(value=value, x=drawn))
    return Conversation("tools", (asked, called, Message("tool", returned), told), schemas)


def _offer(random: Random, kind: Kind) -> Schema:
    return _schema(random, kind, pick(random, kind.names), pick(random, kind.keys))


def _question(random: Random, kind: Kind, value: str) -> str:
    question = pick(random, kind.asks).format(value)
    if random.random() < 0.1:
        question = random.choice(("Please: ", "Hi! ", "Hello, ", "Can you help me? ", "Use a tool. ")) + question
    return question if kind.draw is _file or random.random() < 0.8 else punctuate(random, question)


def _schema(random: Random, kind: Kind, name: str, key: str) -> Schema:
    """An OpenAI tool; what may be left out sometimes is."""
    sort = "integer" if kind.draw is _number else "string"
    field: dict[str, object] = {"type": sort}
    if random.random() < 0.3:
        field["description"] = f"The {key}"
    fields: dict[str, object] = {key: field}
    if random.random() < 0.2:
        extra = random.choice([other for other in EXTRAS if other != key])
        fields[extra] = EXTRAS[extra]
    parameters: dict[str, object] = {"type": "object", "properties": fields}
    if random.random() < 0.75:
        parameters["required"] = [key]
    if random.random() < 0.1:
        parameters["additionalProperties"] = False
    function: dict[str, object] = {"name": name}
    if random.random() < 0.8:
        function["description"] = kind.about + random.choice(("", "", "."))
    function["parameters"] = parameters
    return {"type": "function", "function": function}
