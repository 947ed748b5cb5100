"""Laws of the dialogue generators: seeded, well formed, and rendered as the chat template renders them."""

from random import Random

import pytest
from transformers import PreTrainedTokenizerFast

from models.recipe.conversation import Conversation, render
from models.recipe.dialogues.phrasing import ask
from models.recipe.dialogues.topics import TOPICS, Topic, converse, converse_at_length
from models.recipe.plan import DRAFT, TARGET
from models.recipe.rows import END, READ, SPOKEN, batches, encode, induction

DRAWN = 60
ROLES = {"system", "user", "assistant", "tool"}


def draw(topic: Topic, seed: int = 5) -> list[Conversation]:
    random = Random(seed)
    return [topic(random) for _ in range(DRAWN)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(TARGET.folder)


@pytest.mark.parametrize("topic", [*TOPICS, converse, converse_at_length], ids=lambda topic: topic.__name__)
def test_a_seed_gives_the_same_conversations_every_time(topic: Topic) -> None:
    """Two generators of one seed write the same, and of another seed something else."""
    first, second, other = draw(topic), draw(topic), draw(topic, seed=6)

    assert first == second
    assert first != other


@pytest.mark.parametrize("topic", [*TOPICS, converse, converse_at_length], ids=lambda topic: topic.__name__)
def test_every_conversation_is_well_formed(topic: Topic) -> None:
    """Turns take turns, the assistant has the last word, and no turn is empty."""
    for conversation in draw(topic):
        roles = [message.role for message in conversation.messages]
        turns = roles[1:] if roles[0] == "system" else roles
        repeated = [role for role, following in zip(turns, turns[1:], strict=False) if role == following]

        assert ROLES >= set(roles)
        assert "assistant" == roles[-1]
        assert "system" not in turns
        assert [] == repeated
        assert all(message.text().strip() for message in conversation.messages)
        assert "<|im_" not in "".join(message.text() for message in conversation.messages)


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.__name__)
def test_a_tool_call_names_an_offered_tool(topic: Topic) -> None:
    """With arguments of its parameters only."""
    for conversation in draw(topic):
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in conversation.tools}
        for call in (message.call for message in conversation.messages if message.call is not None):
            assert call.name in offered
            assert set(call.arguments) <= set(offered[call.name]["properties"])


@pytest.mark.parametrize("topic", [converse, converse_at_length], ids=lambda topic: topic.__name__)
def test_rendering_equals_the_chat_template(topic: Topic, tokenizer: PreTrainedTokenizerFast) -> None:
    """The trainer's text is, character by character, what a server gets from the template, plus the answer."""
    for conversation in (drawn for drawn in draw(topic) if not drawn.raw):
        prompt = tokenizer.apply_chat_template(
            conversation.prompt(), tools=list(conversation.tools) or None, add_generation_prompt=True, tokenize=False
        )

        rendered = "".join(segment.text for segment in render(conversation))

        assert prompt + conversation.answer + "<|im_end|>" == rendered


def test_pieces_tokenize_alone_as_they_do_joined(tokenizer: PreTrainedTokenizerFast) -> None:
    """Cutting a conversation where the assistant starts to speak changes no token."""
    for conversation in draw(converse):
        (row,) = encode(tokenizer.backend_tokenizer, [conversation])

        joined = "".join(segment.text for segment in render(conversation))

        assert tokenizer.encode(joined, add_special_tokens=False) == row.ids


def test_spoken_tokens_weigh_in_full(tokenizer: PreTrainedTokenizerFast) -> None:
    """The answer and its end count in full, the question a little."""
    conversation = next(drawn for drawn in draw(converse) if 2 == len(drawn.messages))

    (row,) = encode(tokenizer.backend_tokenizer, [conversation])

    answer = len(tokenizer.encode(conversation.answer, add_special_tokens=False)) + 1
    assert [SPOKEN] * answer == row.weights[-answer:]
    assert {READ} == set(row.weights[:-answer])


def test_induction_weighs_a_copy_of_its_text() -> None:
    """The tokens with a weight are a copy of earlier ones, and an end."""
    row = induction(Random(3))
    spoken = [token for token, weight in zip(row.ids, row.weights, strict=True) if weight]

    output = spoken[:-1]

    assert END == spoken[-1]
    assert output == row.ids[-2 * len(output) - 2 : -len(output) - 2]


def test_a_pool_depends_on_its_number_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    """A resumed run reads the very batches that the first one would have read."""
    first, again = (batches(DRAFT, tokenizer.backend_tokenizer, pool=3) for _ in range(2))

    assert len(first) == len(again)
    assert all(a.ids.equal(b.ids) and a.weights.equal(b.weights) for a, b in zip(first, again, strict=True))
    assert max(batch.ids.numel() for batch in first) <= DRAFT.batch_tokens


def test_a_question_has_many_wordings() -> None:
    """One question comes in a hundred spellings, so that no answer hangs on a question mark."""
    random = Random(11)

    spellings = {ask(random, "what does --slots do") for _ in range(300)}

    assert len(spellings) > 100
