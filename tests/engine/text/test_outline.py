"""Message boundaries in a rendered conversation, with several chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.text.outline import Messages, outline
from engine.text.tokenizer import Tokenizer
from engine.types.request import RenderedPrompt
from tests.engine.kit.models import VOCABULARY, save_tokenizer

Turns = list[dict[str, str]]

TURNS: Turns = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "héllo 😀"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "in the end?"},
]
PLAIN = "{% for m in messages %}<start>{{ m.role }}: {{ m.content }}<end>{% endfor %}"
ASKING = PLAIN + "{% if add_generation_prompt %}<start>assistant: {% endif %}"
# A template that demands a user message first and alternating roles.
STRICT = (
    "{% if messages[0].role == 'system' and messages | length < 2 %}{{ raise_exception('no user') }}{% endif %}"
    "{% if messages[-1].role == 'assistant' %}{{ raise_exception('an answer') }}{% endif %}" + ASKING
)


def rendered(folder: Path, template: str, turns: Turns, **options: bool) -> tuple[RenderedPrompt, list[str], list[str]]:
    """A rendered conversation, the text between its checkpoints, and the protected text."""
    save_tokenizer(folder)
    reader = AutoTokenizer.from_pretrained(folder)
    reader.chat_template = template
    answer = Tokenizer(reader, vocabulary_size=VOCABULARY, context=2000).render_chat(turns, **options)
    places = [0, *answer.checkpoints, len(answer.tokens)]
    ranges = [*zip(places, places[1:], strict=False), *answer.protected]
    texts = [reader.decode(answer.tokens[start:stop]) for start, stop in ranges]
    return answer, texts[: len(places) - 1], texts[len(places) - 1 :]


def written(*turns: dict[str, str]) -> str:
    """The text of some messages as the templates write it."""
    return "".join(f"<start>{turn['role']}: {turn['content']}<end>" for turn in turns)


@pytest.mark.parametrize("template", [PLAIN, ASKING])
@pytest.mark.parametrize("content", ["in the end?", "an <end> in the text", "<start>user: I <end>"])
def test_checkpoints_are_message_ends(tmp_path: Path, template: str, content: str) -> None:
    """The system message, all messages before the last user message, and that message, which is protected."""
    turns = [*TURNS[:3], {"role": "user", "content": content}]
    answer, parts, protected = rendered(tmp_path, template, turns)
    system, others, question = written(turns[0]), written(*turns[1:3]), written(turns[3])

    assert [system, others, question] == parts[:3]
    assert answer.checkpoints[0] == answer.keep
    assert ["<start>assistant: " if template == ASKING else ""] == parts[3:]
    assert [question] == protected


def test_a_refused_prefix_loses_one_checkpoint(tmp_path: Path) -> None:
    """If the start of the last user message is not found, the protected range starts earlier."""
    _, parts, protected = rendered(tmp_path, STRICT, TURNS)

    assert [written(*TURNS), "<start>assistant: "] == parts
    assert [written(*TURNS)] == protected


def test_a_continued_answer_follows_the_last_user_message(tmp_path: Path) -> None:
    """The started answer is not protected."""
    turns = [*TURNS, {"role": "assistant", "content": "The beginning"}]
    _, parts, protected = rendered(tmp_path, PLAIN, turns, continue_final_message=True)

    assert [written(TURNS[3])] == protected
    assert parts[-1].startswith("<start>assistant: The beg")


def test_without_a_user_nothing_is_protected(tmp_path: Path) -> None:
    """A system message alone has at most one checkpoint."""
    answer, _, protected = rendered(tmp_path, ASKING, TURNS[:1])

    assert () == answer.protected
    assert [] == protected


def test_each_prefix_is_rendered_once() -> None:
    """Equal breakpoints, and breakpoints at known ends of messages, render nothing more."""
    calls: list[int] = []

    def render(some: Messages) -> str:
        calls.append(len(some))
        return written(*some)  # type: ignore[arg-type]

    ends = [(0, len(TURNS[0]["content"])), (2, len(TURNS[2]["content"]))]
    plain = outline(TURNS, written(*TURNS), render, finished_messages=len(TURNS))
    before = len(calls)
    marked = outline(
        TURNS, written(*TURNS), render, finished_messages=len(TURNS), breakpoints=[*ends, (1, 3), (1, 3), (1, 3)]
    )

    assert before + 1 == len(calls) - before
    assert {*plain.checkpoints} < {*marked.checkpoints}
