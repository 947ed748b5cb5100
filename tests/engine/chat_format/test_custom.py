"""Custom tools: their text is constrained in every format, and comes out as it was meant."""

from __future__ import annotations

import json
import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from engine.chat_format.message import AnswerDelta, Tool, ToolCallDelta, ToolCallStart, ToolChoice, custom_tool
from engine.chat_format.quoted_grammar import quoted_grammar
from engine.chat_format.tool_input import ToolInputDecoder
from engine.errors import InvalidRequest
from tests.engine.chat_format.speakers import SPEAKERS, calls_of, read
from tests.engine.chat_format.test_grammar import dialect, everyone, walk

# As in the patches that coding agents write: lines, of which some hold anything.
LINES = r"""
start: "*** Begin" LF line{1,2} "*** \"End\"" LF?
line: ("+" | "-") /(.{0,3})/ LF
%import common.LF
"""
WRITTEN = re.compile(r'\*\*\* Begin\n([+-][^\n]{0,3}\n){1,2}\*\*\* "End"\n?')
TEXTS = ("a\nb", 'a"b', "axb", "\n", '"', '"a\n', "x", "a\\", ' \t"', ']"', '"b', "\t\\/x", "n\n", "N\n", "", "\r\n")
ONE = LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    """Whether a text follows a grammar."""
    matcher = LLMatcher(ONE, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def inputs(name: str, tool: Tool) -> list[str]:
    """What is given to a custom tool in random answers that must call it."""
    speaker, random = SPEAKERS[name], Random(f"{name} {tool.name}")
    grammar = dialect(name).grammar([tool], ToolChoice("required", parallel=False), None, speaker.opened)
    assert grammar is not None
    texts = [text for _ in range(2) if (text := walk(name, grammar.source, random)) is not None]
    found = [read(dialect(name), [text], [tool], speaker.opened) for text in texts]
    assert all(ToolCallStart(0, tool.name, "custom") in pieces for pieces in found)
    return [calls_of(pieces)[0][1] for pieces in found]


@everyone
def test_a_text_follows_its_grammar_in_every_format(name: str) -> None:
    """Line breaks, quotes and all, whether the format writes them as they are or escaped."""
    for text in inputs(name, custom_tool("patch", grammar=LINES)):
        assert WRITTEN.fullmatch(text), text


@everyone
def test_a_text_follows_its_regular_expression_in_every_format(name: str) -> None:
    """The same, whatever the expression holds."""
    for text in inputs(name, custom_tool("say", pattern=r'[a-c"\n]{2,4}!')):
        assert re.fullmatch(r'[a-c"\n]{2,4}!', text), text


@everyone
def test_any_text_comes_out_as_it_was_written(name: str) -> None:
    """However it is cut: the call is opened as one of a custom tool, and its pieces are the text."""
    speaker, tool = SPEAKERS[name], custom_tool("run")
    wanted = 'print("é\\n😀")\n\tx = {1}'
    written = speaker.write([("run", {"input": wanted})])
    expected: list[AnswerDelta] = [ToolCallStart(0, "run", "custom"), ToolCallDelta(0, wanted)]

    assert expected == read(speaker.dialect, [written], [tool], speaker.opened)
    assert expected == read(speaker.dialect, list(written), [tool], speaker.opened)


@pytest.mark.parametrize(
    "expression",
    [
        *(r"a.b", r"[^x]+", r'[\n"a]+', r"\x22\u0022", r"\s+\S", r'a|"(b|\\)*', r'[]"a]+', r'[a"&&["b]]+', r"\p{P}{2}"),
        *(r"\t\\\/x", r"a\nb", r"(?:ab){2}", r'"[^"]*"', r'(a|"|\n){2,3}', r"\r?\n", r"[^]]", r"(.+)", r"[a-z]+"),
    ],
)
def test_what_json_writes_follows_the_quoted_grammar(expression: str) -> None:
    """A text follows a grammar exactly if its JSON follows the quoted one."""
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
def test_what_cannot_be_quoted_is_refused(grammar: str) -> None:
    """Rather than followed in part."""
    with pytest.raises(InvalidRequest):
        dialect("hermes").grammar([custom_tool("f", grammar=grammar)], ToolChoice("required"), None, "")


@given(text=st.text('ab"\\\n\t\x00\x7fé😀\u2028', max_size=12), data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_text_is_read_out_of_its_arguments(text: str, data: st.DataObject) -> None:
    """However JSON writes it, and wherever it is cut."""
    for ascii_only in (True, False):
        arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
        cut = data.draw(st.integers(0, len(arguments)))
        reader = ToolInputDecoder()

        assert text == reader.push(arguments[:cut]) + reader.push(arguments[cut:]) + reader.finish()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "ab\\u00', "ab"),
        ('{"input": "\\ud83d!"}', "\ufffd!"),
        ('{"code": "x"}', '{"code": "x"}'),
        ("x", "x"),
    ],
)
def test_what_is_cut_or_of_another_shape(arguments: str, text: str) -> None:
    """Half of an escape is nothing; what is no such object is the text itself."""
    reader = ToolInputDecoder()

    assert text == reader.push(arguments) + reader.finish()
