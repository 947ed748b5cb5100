"""Facts told earlier in the conversation and asked for later."""

from random import Random

from models.recipe.conversation import Conversation, Message
from models.recipe.dialogues import words
from models.recipe.dialogues.arithmetic import arithmetic
from models.recipe.dialogues.phrasing import pick, punctuate

NAME = "what is my name|what's my name|who am i|do you remember my name|tell me my name|do you know my name|my name is"
FORGOTTEN = "You have not told me that yet."


def recall(random: Random) -> Conversation:
    """One or two facts, perhaps other talk, and a question about one of them."""
    kind = random.choices((_person, _favourite, _secret, _system, _untold), (40, 25, 17, 10, 8))[0]
    told, question, answer = kind(random)
    if told[-1].role == "assistant" and random.random() < 0.4:
        told = (*told, *arithmetic(random).messages)
    ending = Message("user", punctuate(random, question)), Message("assistant", answer)
    return Conversation("recall", (*told, *ending))


def _person(random: Random) -> tuple[tuple[Message, ...], str, str]:
    who, where = words.name(random), words.city(random)
    both = random.random() < 0.6
    if both:
        told = pick(
            random,
            "My name is {} and I live in {}.|Hi, I am {} from {}.|I am {} and I live in {}.|Hello! I'm {} from {}.|"
            "my name is {} and i live in {}|Hey, my name is {}. I live in {}.",
        ).format(who, where)
    else:
        told = pick(
            random,
            "My name is {}.|Hi, I am {}.|I'm {}.|my name is {}|Hello, my name is {}!|Call me {}.|Hi! My name is {}|"
            "Hey, I am {}, nice to meet you.|Remember that my name is {}.",
        ).format(who)
    spoken = Message("user", told), Message("assistant", f"Nice to meet you, {who}!")
    if both and random.random() < 0.5:
        return (
            spoken,
            pick(random, "where do i live|where am i from|which city do i live in|what is my city"),
            (f"You live in {where}."),
        )
    return spoken, pick(random, NAME.removesuffix("|my name is")), f"Your name is {who}."


def _favourite(random: Random) -> tuple[tuple[Message, ...], str, str]:
    kind, value = random.choice(
        (
            ("colour", random.choice(words.COLOURS)),
            ("color", random.choice(words.COLOURS)),
            ("animal", random.choice(words.ANIMALS)),
            ("fruit", random.choice(words.FRUITS)),
            ("city", words.city(random)),
            ("number", str(random.randint(0, 99))),
            ("word", words.word(random)),
        )
    )
    told = pick(
        random, "My favourite {} is {}.|my favorite {} is {}|I want you to know that my favourite {} is {}."
    ).format(kind, value)
    spoken = Message("user", told), Message("assistant", f"Good to know: {value}.")
    spelling = random.choice(("favourite", "favorite"))
    form = pick(random, "what is my {} {}|which {} {} do i have|tell me my {} {}|what's my {} {}")
    return spoken, form.format(spelling, kind), f"Your favourite {kind} is {value}."


def _secret(random: Random) -> tuple[tuple[Message, ...], str, str]:
    kind = random.choice(("secret word", "password", "code", "magic word", "secret number", "key"))
    value = words.word(random)
    if kind in ("code", "secret number") or random.random() < 0.2:
        value = str(random.randint(0, 9999))
    told = pick(random, "The {} is {}.|the {} is {}|Remember: the {} is {}.|Remember this: the {} is {}.")
    spoken = Message("user", told.format(kind, value)), Message("assistant", "I will remember that.")
    form = pick(random, "what is the {}|what was the {}|tell me the {}|do you remember the {}|what's the {}")
    return spoken, form.format(kind), f"The {kind} is {value}."


def _system(random: Random) -> tuple[tuple[Message, ...], str, str]:
    who = words.name(random)
    if random.random() < 0.5:
        told = pick(random, "The user is called {}.|The user's name is {}.|You talk to {}. Be brief.").format(who)
        return (Message("system", told),), pick(random, NAME.removesuffix("|my name is")), f"Your name is {who}."
    told = pick(random, "Your name is {}.|You are {}.|You are {}, a helpful assistant.|You are called {}.").format(who)
    return (Message("system", told),), pick(random, "what is your name|who are you|what's your name"), f"I am {who}."


def _untold(random: Random) -> tuple[tuple[Message, ...], str, str]:
    question = pick(random, NAME.removesuffix("|my name is") + "|where do i live|what is my favourite colour")
    if random.random() < 0.5:
        return arithmetic(random).messages, question, FORGOTTEN
    return (Message("system", "You are a helpful assistant."),), question, FORGOTTEN
