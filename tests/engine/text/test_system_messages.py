"""Templates that refuse or leave out system messages get their text in the next user message."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.text.system_messages import fold_system_messages
from engine.text.tokenizer import Tokenizer

BUNDLED = Path(__file__).parents[3] / "models" / "target"
# As Gemma 2 and Mistral 7B: they raise, and demand alternating roles.
REFUSING = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DROPPING = "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
RENDERING = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi."}
ASSISTANT = {"role": "assistant", "content": "Yes?"}


def tokenizer(template: str) -> Tokenizer:
    loaded = AutoTokenizer.from_pretrained(BUNDLED)
    loaded.chat_template = template
    return Tokenizer(loaded, vocabulary_size=len(loaded), context=2000)


@pytest.mark.parametrize(("template", "renders"), [(REFUSING, False), (DROPPING, False), (RENDERING, True)])
def test_the_role_is_found_by_rendering(template: str, renders: bool) -> None:
    loaded = tokenizer(template)
    text = loaded.decode(loaded.render_chat([SYSTEM, USER]).tokens)

    assert loaded.has_system_role is renders
    assert text == ("<system>Be brief.<user>Hi." if renders else "<user>Be brief.\n\nHi.")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([SYSTEM, SYSTEM, USER], ["Be brief.\n\nBe brief.\n\nHi."]),
        ([USER, ASSISTANT, SYSTEM, USER], ["Hi.", "Yes?", "Be brief.\n\nHi."]),
        ([USER, SYSTEM], ["Hi.\n\nBe brief."]),
        ([SYSTEM], ["Be brief."]),
        ([USER, ASSISTANT, SYSTEM], ["Hi.", "Yes?", "Be brief."]),
        ([SYSTEM, USER, ASSISTANT], ["Be brief.\n\nHi.", "Yes?"]),
    ],
)
def test_system_messages_join_a_user_message(messages: list[dict[str, object]], expected: list[str]) -> None:
    """Each text is found at its place, and the roles alternate."""
    folded = fold_system_messages(messages)

    assert expected == [message["content"] for message in folded.messages]
    assert ["user", "assistant", "user"][: len(expected)] == [message["role"] for message in folded.messages]
    for message, (index, start) in zip(messages, folded.places, strict=True):
        assert str(folded.messages[index]["content"])[start:].startswith(str(message["content"]))


def test_a_breakpoint_of_a_system_message_is_kept() -> None:
    loaded = tokenizer(REFUSING)
    plain = loaded.render_chat([SYSTEM, USER])
    marked = loaded.render_chat([SYSTEM, USER], breakpoints=[(0, len("Be brief."))])

    (checkpoint,) = set(marked.checkpoints) - set(plain.checkpoints)
    assert loaded.decode(marked.tokens[:checkpoint]) == "<user>Be brief."
