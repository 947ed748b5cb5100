"""Questions written by hand that no generator writes, each with what a right answer must contain.

They measure what the generated test set cannot: how far the model carries past its own templates.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Probe:
    """A conversation of user turns, answered in turn, and a part of the last right answer."""

    turns: tuple[str, ...]
    holds: str
    system: str = ""


def _one(question: str, holds: str) -> Probe:
    return Probe((question,), holds)


PROBES = (
    _one("Hi!", "Hello"),
    _one("Good day to you", "Hello"),
    _one("Who are you and what can you do?", "bundled model"),
    _one("So, what exactly is this Cellar thing?", "inference server"),
    _one("In a few words, what is Cellar?", "inference server"),
    _one("Could you give me a short introduction to Cellar, please?", "inference server"),
    _one("Which company made you?", "Cellar project"),
    _one("What's the purpose of the --slots option?", "sequences run at once"),
    _one("I don't get what --overflow is supposed to do.", "context is full"),
    _one("If I pass --max-waiting, what changes?", "queue"),
    _one("What is --port and what is its default?", "port"),
    _one("Tell me how to make the server listen on port 1234.", "--port"),
    _one("My prompts are too long. Which flag helps?", "--context"),
    _one("I'd like to require an API key from clients.", "--api-key"),
    _one("How many requests can run in parallel and how do I change that?", "slot"),
    _one("What URL do I scrape for Prometheus?", "/metrics"),
    _one("Which URL tells me if the server is alive?", "/health"),
    _one("What does GET /v1/models give me?", "lists the models"),
    _one("How can my client receive tokens one by one?", "stream"),
    _one("What will I see at the end of a streamed response?", "[DONE]"),
    _one("Please describe what a slot is in this server.", "slot"),
    _one("What do you call a cell?", "keys and values"),
    _one("How come the second request with the same beginning is faster?", "copy_prefix"),
    _one("What's continuous batching and why is it useful?", "running batch"),
    _one("Could you explain speculative decoding in simple terms?", "draft"),
    _one("What role does the draft model play?", "guesses"),
    _one("And what is temperature good for?", "random"),
    _one("Does a seed make the output reproducible?", "repeatable"),
    _one("How do I load a larger model from Hugging Face?", "cellar serve"),
    _one("Is a graphics card necessary?", "laptop"),
    _one("how to use docker with this", "docker compose"),
    _one("whats ur name", "bundled model"),
    _one("thx!!", "welcome"),
    _one("Ok, see you tomorrow then!", "Goodbye"),
    _one("Write a Python script that renames all files in a folder.", "too small"),
    _one("Explain the theory of relativity.", "too small"),
    _one("Who was the first man on the moon?", "too small"),
    _one("Can you translate 'good morning' into Spanish?", "English"),
    _one("Can you speak French?", "English"),
    _one("Write a sonnet about autumn leaves.", "too small"),
    _one("How many people live in Canada?", "too small"),
    _one("My back hurts, what should I do?", "too small"),
    _one("What's 2+2?", "4"),
    _one("2+3", "5"),
    _one("what is 9 plus 6?", "15"),
    _one("Could you tell me what 12 - 5 is?", "7"),
    _one("How much is 6 times 7?", "42"),
    _one("Repeat after me: the quick brown fox", "the quick brown fox"),
    _one("Please repeat the following: Cellar is running on port 8000", "Cellar is running on port 8000"),
    _one('Say "hello world"', "hello world"),
    _one("Name three colours.", ","),
    _one("Count to five.", "1, 2, 3, 4, 5"),
    _one("What is the capital of France?", "Paris"),
    _one("What is the opposite of hot?", "cold"),
    _one("Tell me a short story about a fox.", "fox"),
    _one("Extract name and age as JSON: Maria is 31 years old.", '{"name": "Maria", "age": 31}'),
    _one("Extract the city as JSON: Tom lives in Berlin.", '{"city": "Berlin"}'),
    Probe(("My name is Ferdinand.", "What is my name?"), "Ferdinand"),
    Probe(("Hi, I'm Zelda and I live in Porto.", "Thanks!", "Where do I live?"), "Porto"),
    Probe(("The password is tangerine.", "What is 2 + 2?", "What is the password?"), "tangerine"),
    Probe(("What is context shift?", "How do I turn it on?"), "--overflow"),
    Probe(("Hello", "What is Cellar?", "How do I start it?"), "cellar serve"),
    Probe(("Hi",), "Hello", "You are a pirate who answers in rhymes."),
    Probe(("What does --host do?",), "address", "You are a support agent for our server."),
)
