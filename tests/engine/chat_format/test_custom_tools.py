"""Custom tools: their input is constrained in every chat format, and decoded without loss."""

from __future__ import annotations

import json
import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from engine.chat_format.delta_buffer import ToolInputDecoder
from engine.chat_format.message import AnswerDelta, Tool, ToolCallDelta, ToolCallStart, ToolChoice, custom_tool
from engine.chat_format.quoted_grammar import quoted_grammar
from engine.errors import InvalidRequest
from tests.engine.chat_format.examples import EXAMPLES, calls_of, every_format, read
from tests.engine.chat_format.test_grammar import chat_format, walk

# Similar to the patch format of coding agents.
LINES = r"""
start: "*** Begin" LF line{1,2} "*** \"End\"" LF?
line: ("+" | "-") /(.{0,3})/ LF
%import common.LF
"""
WRITTEN = re.compile(r'\*\*\* Begin\n([+-][^\n]{0,3}\n){1,2}\*\*\* "End"\n?')
TEXTS = ("a\nb", 'a"b', "axb", "\n", '"', '"a\n', "x", "a\\", ' \t"', ']"', '"b', "\t\\/x", "n\n", "N\n", "", "\r\n")
ONE = LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(ONE, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def inputs(name: str, tool: Tool) -> list[str]:
    """Inputs of a custom tool in random answers that must call it."""
    example, random = EXAMPLES[name], Random(f"{name} {tool.name}")
    grammar = chat_format(name).grammar([tool], ToolChoice("required", parallel=False), None, example.generation_prompt)
    assert grammar is not None
    texts = [text for _ in range(2) if (text := walk(name, grammar.source, random)) is not None]
    found = [read(chat_format(name), [text], [tool], example.generation_prompt) for text in texts]
    assert all(ToolCallStart(0, tool.name, "custom") in deltas for deltas in found)
    return [calls_of(deltas)[0][1] for deltas in found]


@every_format
def test_input_follows_its_grammar_in_every_format(name: str) -> None:
    """With line breaks and quotes, whether the format escapes them or not."""
    for text in inputs(name, custom_tool("patch", grammar=LINES)):
        assert WRITTEN.fullmatch(text), text


@every_format
def test_input_follows_its_regular_expression_in_every_format(name: str) -> None:
    for text in inputs(name, custom_tool("say", pattern=r'[a-c"\n]{2,4}!')):
        assert re.fullmatch(r'[a-c"\n]{2,4}!', text), text


@every_format
def test_any_input_is_decoded_without_loss(name: str) -> None:
    """In one chunk or per character; the call is started as one of a custom tool."""
    example, tool = EXAMPLES[name], custom_tool("run")
    expected_input = 'print("é\\n😀")\n\tx = {1}'
    written = example.write([("run", {"input": expected_input})])
    expected: list[AnswerDelta] = [ToolCallStart(0, "run", "custom"), ToolCallDelta(0, expected_input)]

    assert expected == read(example.chat_format, [written], [tool], example.generation_prompt)
    assert expected == read(example.chat_format, list(written), [tool], example.generation_prompt)


@pytest.mark.parametrize("literal", ['"' + r"\"" * 100_000, "/" + r"\/" * 100_000], ids=["string", "regex"])
def test_unclosed_literal_is_left_to_the_compiler(literal: str) -> None:
    """In linear time: the square would take minutes."""
    assert quoted_grammar(f"start: {literal}\n") == f"start: {literal}\n"


@pytest.mark.parametrize(
    "expression",
    [
        *(r"a.b", r"[^x]+", r'[\n"a]+', r"\x22\u0022", r"\s+\S", r'a|"(b|\\)*', r'[]"a]+', r'[a"&&["b]]+', r"\p{P}{2}"),
        *(r"\t\\\/x", r"a\nb", r"(?:ab){2}", r'"[^"]*"', r'(a|"|\n){2,3}', r"\r?\n", r"[^]]", r"(.+)", r"[a-z]+"),
    ],
)
def test_json_string_follows_the_quoted_grammar(expression: str) -> None:
    """A text follows a grammar if and only if its JSON string follows the quoted grammar."""
    for flags in ("", "s", "i"):
        grammar = f"start: /{expression}/{flags}\n"
        quoted = quoted_grammar(grammar)

        for text in TEXTS:
            assert accepts(grammar, text) == accepts(quoted, json.dumps(text, ensure_ascii=False)[1:-1]), (text, quoted)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('start: "a\\nb" | X\nX: "\\""i "\\x41"\n', '"A'),
        ('start: WS? "a" WS "b"\n%import common.WS\n', "\ta\n b"),
        ('start: A B\nA: "a".."c"\nB: "!".."$"\n', 'b"'),
        ('%ignore /[ \\n]+/\nstart: "a" "b"\n', "a\n b"),
        ('start: N "\\n" NEWLINE\n%import common.INT -> N\n%import common (NEWLINE)\n', "12\n\r\n"),
    ],
)
def test_terminals_of_every_kind_are_quoted(grammar: str, text: str) -> None:
    """Strings, ranges, imported and ignored terminals."""
    quoted = quoted_grammar(grammar)

    assert accepts(grammar, text)
    assert accepts(quoted, json.dumps(text)[1:-1])
    assert not accepts(quoted, text)


@pytest.mark.parametrize(
    "grammar",
    [
        *('start: %json {"type": "object"}', "start: <think>", "start: X\nX: /a/ & ~/b/", "start: /a$/"),
        *("start: X\n%import common.C_COMMENT -> X", '%ignore /(ab)+/\nstart: "a"', "start: /[/"),
    ],
)
def test_constructs_without_quoted_form_are_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequest):
        chat_format("hermes").grammar([custom_tool("f", grammar=grammar)], ToolChoice("required"), None, "")


@given(text=st.text('ab"\\\n\t\x00\x7fé😀\u2028', max_size=12), data=st.data())
@settings(max_examples=50, deadline=None)
def test_input_is_decoded_from_arguments(text: str, data: st.DataObject) -> None:
    """With any JSON escapes and any chunk boundary."""
    for ascii_only in (True, False):
        arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
        cut = data.draw(st.integers(0, len(arguments)))
        decoder = ToolInputDecoder()

        assert text == decoder.push(arguments[:cut]) + decoder.push(arguments[cut:]) + decoder.finish()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "ab\\u00', "ab"),
        ('{"input": "\\ud83d!"}', "\ufffd!"),
        ('{"code": "x"}', '{"code": "x"}'),
        ("x", "x"),
    ],
)
def test_truncated_or_unexpected_arguments(arguments: str, text: str) -> None:
    """An incomplete escape is dropped; arguments of another shape are the input themselves."""
    decoder = ToolInputDecoder()

    assert text == decoder.push(arguments) + decoder.finish()
