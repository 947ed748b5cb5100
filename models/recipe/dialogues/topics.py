"""All topics, how often each is drawn, and what is put around a drawn conversation."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TypeAlias

from models.recipe.conversation import Conversation, Message
from models.recipe.dialogues import long
from models.recipe.dialogues.about import about
from models.recipe.dialogues.arithmetic import arithmetic
from models.recipe.dialogues.concepts import concepts
from models.recipe.dialogues.copying import copying
from models.recipe.dialogues.endpoints import endpoints
from models.recipe.dialogues.extraction import extraction
from models.recipe.dialogues.facts import facts
from models.recipe.dialogues.flags import flags
from models.recipe.dialogues.lists import counting, lists
from models.recipe.dialogues.out_of_scope import out_of_scope
from models.recipe.dialogues.plain import plain
from models.recipe.dialogues.recall import recall
from models.recipe.dialogues.small_talk import small_talk
from models.recipe.dialogues.stories import stories
from models.recipe.dialogues.tools import tools

Topic: TypeAlias = Callable[[Random], Conversation]

# The share of rows; tools and stories have long rows, so their share of tokens is larger.
TOPICS: dict[Topic, float] = {
    about: 8, flags: 8, endpoints: 5, concepts: 6, small_talk: 5, out_of_scope: 8, arithmetic: 13, copying: 14,
    lists: 3, counting: 2, extraction: 13, recall: 11, facts: 4, stories: 2, tools: 12, plain: 2,
}  # fmt: skip
SHORT: dict[Topic, float] = {
    topic: share for topic, share in TOPICS.items() if topic not in (stories, tools, plain, lists, recall)
}
SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful assistant.", "Be brief.",
    "Answer simply.", "You are a friendly assistant.", "Answer in one sentence.", "You are an assistant.",
    "You are a helpful, honest and harmless assistant.", "You are Cellar's bundled model.", "Be concise and polite.",
    "You are a chat bot. Answer the user's questions.", "You are an AI assistant that helps people find information.",
    "You are a helpful assistant. Keep answers short.", "Answer the question.", "You are an expert.", "Help the user.",
    "Respond in English.", "You are a test assistant.", "Follow the user's instructions carefully.",
)  # fmt: skip


def converse(random: Random) -> Conversation:
    """Draw a topic, a conversation, and perhaps a system prompt or earlier turns around it."""
    topic = random.choices(tuple(TOPICS), tuple(TOPICS.values()))[0]
    conversation = topic(random)
    if conversation.raw or conversation.messages[0].role == "system":
        return conversation
    if topic is not tools and random.random() < 0.15:
        conversation = conversation.after(long.chat(random, _short, random.choice((1, 1, 2))))
    return _with_system(random, conversation)


def converse_at_length(random: Random) -> Conversation:
    """A conversation of hundreds of tokens: a needle in a text, many turns, or a long system prompt."""
    kind = random.randrange(4)
    if kind == 0:
        return long.needle(random)
    if kind == 1:
        return _remote(random)
    if kind == 2:
        whole = replace(long.chat(random, _short, random.randint(4, 16)), topic="long prompts")
        return _with_system(random, whole)
    short = _short(random)
    system = Message("system", long.long_system(random))
    return replace(short, topic="long prompts", messages=(system, *short.messages))


def _remote(random: Random) -> Conversation:
    """A fact told, much other talk, and the question about the fact."""
    told = recall(random)
    between = long.chat(random, _short, random.randint(2, 10)).messages
    messages = (*told.messages[:-2], *between, *told.messages[-2:])
    return replace(told, topic="long prompts", messages=messages)


def _short(random: Random) -> Conversation:
    """A conversation without a system turn."""
    while True:
        drawn = random.choices(tuple(SHORT), tuple(SHORT.values()))[0](random)
        if drawn.messages[0].role != "system":
            return drawn


def _with_system(random: Random, conversation: Conversation) -> Conversation:
    """Half of all conversations start with one of the usual system prompts; tools come with fewer."""
    if random.random() >= (0.2 if conversation.tools else 0.45) or conversation.messages[0].role == "system":
        return conversation
    system = Message("system", random.choice(SYSTEMS))
    return replace(conversation, messages=(system, *conversation.messages))
