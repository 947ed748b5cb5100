"""Rendered prompts with tools and breakpoints, and single tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.chat_format.message import ReasoningDelta, TextDelta, Tool
from engine.errors import ContextTooLong, InvalidRequest
from engine.text.tokenizer import Tokenizer
from engine.types.content import ContentKind, Upload
from engine.types.request import RenderedPrompt
from tests.engine.chat_format.examples import calls_of, read

BUNDLED = Path(__file__).parents[3] / "models" / "target"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [Tool("weather", "The weather", json.dumps(SCHEMA)), Tool("ring")]
ASKED: list[dict[str, object]] = [{"role": "user", "content": "Hello there"}]

# A template that opens the reasoning, or closes it at once.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if quiet is defined %}\n</think>\n\n{% endif %}{% endif %}"
)


@cache
def bundled(template: str | None = None) -> Tokenizer:
    """The bundled tokenizer, with its own template or another."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.chat_template = template or tokenizer.chat_template
    return Tokenizer(tokenizer, vocabulary_size=len(tokenizer), context=2000)


@pytest.mark.parametrize("letters", ["a word and more, ", "äöü€🦙 "])
def test_encode_truncated_equals_the_prefix_alone(letters: str) -> None:
    """More tokens than the context holds, equal to the tokens of the whole text except for the last few."""
    tokenizer = bundled()
    text = letters * 100_000
    with pytest.raises(ContextTooLong):
        tokenizer.encode(text)

    found = tokenizer.encode_truncated(text)

    assert len(found) > 2000
    assert AutoTokenizer.from_pretrained(BUNDLED)(text[:20_000])["input_ids"][:2000] == found[:2000]
    assert tokenizer.encode(letters) == tokenizer.encode_truncated(letters)


@pytest.mark.parametrize(("kind", "name"), [("image", "images"), ("audio", "audio")])
def test_a_model_of_text_refuses_uploads(kind: ContentKind, name: str) -> None:
    """The error names the field of the upload."""
    messages: list[dict[str, object]] = [{"role": "user", "content": [{"type": kind}]}]

    with pytest.raises(InvalidRequest, match=f"this model reads text only, no {name}") as error:
        bundled().render_chat(messages, uploads=[Upload(kind, b"", "messages[0].content[0]")])

    assert error.value.field == "messages[0].content[0]"


def test_tools_reach_the_template_in_openai_s_shape() -> None:
    """The prompt equals that of transformers."""
    reader = AutoTokenizer.from_pretrained(BUNDLED)
    offers = [
        {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "ring", "parameters": {"type": "object", "properties": {}}}},
    ]
    expected = reader.apply_chat_template(ASKED, tools=offers, add_generation_prompt=True, return_dict=False)

    assert tuple(expected) == bundled().render_chat(ASKED, tools=TOOLS).tokens


def test_a_special_token_in_a_tool_is_plain_text() -> None:
    """No description can end a message."""
    tool = Tool("ring", "<|im_end|>")
    rendering = bundled().render_chat(ASKED, tools=[tool])
    (end,) = bundled().encode("<|im_end|>", add_special=False)

    assert 2 == rendering.tokens.count(end)
    assert "<|im_end|>" in bundled().decode(rendering.tokens[:-30])


@pytest.mark.parametrize("content", ["Hello there", "an <|im_end|> in it"])
def test_the_generation_prompt_is_returned(content: str) -> None:
    """With and without special tokens in the messages."""
    turns = [{"role": "user", "content": content}]

    assert "<|im_start|>assistant\n" == bundled().render_chat(turns).generation_prompt
    assert "" == bundled().render_chat(turns, add_generation_prompt=False).generation_prompt
    assert "<|im_start|>assistant\n<think>\n" == bundled(THINKING).render_chat(turns).generation_prompt


def test_reasoning_opened_by_the_template_continues() -> None:
    """The answer starts as reasoning, or as text if the template closed the reasoning."""
    tokenizer = bundled(THINKING)
    thinking = tokenizer.render_chat(ASKED).generation_prompt
    quiet = tokenizer.render_chat(ASKED, arguments={"quiet": True}).generation_prompt
    chat_format = tokenizer.chat_format

    assert [ReasoningDelta("hm"), TextDelta("yes")] == read(chat_format, ["hm\n</think>\n\nyes"], [], thinking)
    assert [TextDelta("yes")] == read(chat_format, ["yes"], [], quiet)


def test_a_continued_answer_returns_its_start() -> None:
    """Inside its reasoning, or after it."""
    tokenizer = bundled(THINKING)

    def opened(content: str) -> str:
        turns = [*ASKED, {"role": "assistant", "content": content}]
        return tokenizer.render_chat(turns, continue_final_message=True).generation_prompt

    assert "<|im_start|>assistant\n<think>hm" == opened("<think>hm")
    assert [ReasoningDelta("so"), TextDelta("yes")] == read(
        tokenizer.chat_format, ["so</think>yes"], [], opened("<think>hm")
    )
    assert [TextDelta(" yes")] == read(tokenizer.chat_format, [" yes"], [], opened("<think>hm</think>Oh"))


def marked(rendering: RenderedPrompt, tokenizer: Tokenizer) -> list[str]:
    """The text before each checkpoint."""
    return [tokenizer.decode(rendering.tokens[:mark]) for mark in rendering.checkpoints]


@pytest.mark.parametrize("template", [None, THINKING])
@pytest.mark.parametrize("content", ["one two\n\nthree four", "one <|im_end|>\n\nthree four"])
def test_a_breakpoint_is_exact_to_the_token(template: str | None, content: str) -> None:
    """Also in a template that trims the ends of messages."""
    tokenizer = bundled(template)
    cut = content.index("three")
    plain = tokenizer.render_chat([{"role": "user", "content": content}, *ASKED])
    rendering = tokenizer.render_chat([{"role": "user", "content": content}, *ASKED], breakpoints=[(0, cut)])
    added = set(marked(rendering, tokenizer)) - set(marked(plain, tokenizer))

    assert plain.tokens == rendering.tokens
    assert [f"<|im_start|>user\n{content[:cut]}".rstrip()] == [text.rstrip() for text in added]


def test_a_breakpoint_after_a_message_is_its_end() -> None:
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, *ASKED]
    rendering = bundled().render_chat(turns, breakpoints=[(0, 3)])

    assert "<|im_start|>user\none<|im_end|>\n" in marked(rendering, bundled())


def test_the_bundled_chat_format_is_detected() -> None:
    """Tool calls between two markers that are added tokens but not special, and no reasoning."""
    dialect = bundled().chat_format
    text = '<tool_call>\n{"name": "ring", "arguments": {}}\n</tool_call>'

    assert (True, False, False) == (dialect.supports_tool_calls, dialect.supports_reasoning, dialect.special)
    assert [("ring", "{}")] == calls_of(read(dialect, [text], TOOLS))


def test_special_tokens_are_text_on_request() -> None:
    tokenizer = bundled()
    tokens = tokenizer.encode("a<|endoftext|>b", add_special=False)

    def output(*, special: bool) -> str:
        decoder = tokenizer.detokenizer((), special=special)
        return "".join(decoder.push(token) for token in tokens) + decoder.flush()

    assert "ab" == output(special=False)
    assert "a<|endoftext|>b" == output(special=True)


def test_describe_tokens_returns_text_and_bytes() -> None:
    tokenizer = bundled()
    tokens = tokenizer.encode("Hello, <tool_call> é😀", add_special=False)
    pieces = tokenizer.describe_tokens(tokens)

    assert "Hello, <tool_call> é😀" == tokenizer.decode(tokens)
    assert tokens == [piece.token for piece in pieces]
    assert "Hello, <tool_call> é😀".encode() == b"".join(piece.bytes for piece in pieces)


def test_an_invalid_token_id_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        bundled().decode([10**6])
    with pytest.raises(InvalidRequest):
        bundled().describe_tokens([-1])
