"""Writes a grammar in llguidance's dialect of Lark, where a marker that is one token is a terminal of its own.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. Terminals have upper-case names, rules lower-case
ones. A terminal reads as much as it can and never gives back: so text that ends with a marker in letters is a lazy
rule together with the marker, and text without a marker is a terminal that cannot hold it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from llguidance.gbnf_to_lark import any_to_lark

from engine.chat_format.message import AnswerConstraint
from engine.errors import InvalidRequest
from engine.types.request import Grammar

ANYTHING = "(?s:.)*"

# Compact JSON, with at most the spaces that json.dumps writes: fewer tokens, and no model loses itself in whitespace.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_SPACE = r"/[ \n]{1,2}/"
_REGEX_SPECIALS = re.compile(r"[\\.+*?()|\[\]{}^$]")
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)


class LarkWriter:
    """A grammar that is being written. What its methods return are expressions for other rules.

    tokens  texts that are a token of their own
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._lines: dict[str, str] = {}

    def rule(self, expression: str, *, options: str = "") -> str:
        """A rule of its own."""
        return self._name("r", options, expression)

    def pattern(self, expression: str) -> str:
        """A terminal of its own, made of regular expressions."""
        return self._name("T", "", expression)

    def space(self) -> str:
        """The whitespace that may stand between parts."""
        return self.pattern(_SPACE) + "?"

    def plain_text(self, text: str) -> str:
        """A text in ordinary tokens."""
        return json.dumps(text, ensure_ascii=False)

    def literal(self, text: str) -> str:
        """A marker: a token of its own, or letters."""
        number = self._tokens.get(text)
        return self.plain_text(text) if number is None else f"<[{number}]>"

    def literals(self, *texts: str) -> str:
        """Markers behind each other, with whitespace between."""
        return f" {self.space()} ".join(self.literal(text) for text in texts if text)

    def text(self, *without: str, like: Sequence[str] = (ANYTHING,)) -> str:
        """Text that holds none of these literals and follows all of these expressions."""
        barred = "|".join(map(escaped, without))
        parts = [*map(regex, like), *([f"~{regex(f'{ANYTHING}({barred}){ANYTHING}')}"] if barred else [])]
        return self.pattern(" & ".join(parts))

    def until(self, literal: str, *, like: Sequence[str] = (ANYTHING,), before: str = "") -> str:
        """Such text up to a literal, and that; `before` stands before it, where the text is no such token's."""
        text = self.text(literal, like=like)
        if literal in self._tokens:
            return f"{text} {self.literal(literal)}"
        return self.rule(f"{text} {self.plain_text(before + literal)}", options="[lazy]")

    def json(self, schema: Mapping[str, object], *, lenient: bool = False) -> str:
        """JSON that follows a schema; lenient: as far as it can be kept."""
        options = {**_COMPACT, **({"lenient": True} if lenient else {})}
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def answer_body(self, body: AnswerConstraint) -> str:
        """What a client wants as the text of the answer. Raises InvalidRequest."""
        match body.kind:
            case "json_schema":
                return self.json(json.loads(body.source), lenient=not body.strict)
            case "json_object":
                return self.json({"type": "object"})
            case "regex":
                return self.pattern(regex(body.source))
            case "choices":
                return alternatives(map(self.plain_text, body.choices))
            case "grammar":
                return self.nested(_to_lark(body.source))

    def nested(self, source: str) -> str:
        """What follows a Lark grammar of its own."""
        return self.rule(f"%lark {{\n{source}\n}}")

    def grammar(self, start: str) -> Grammar:
        """The whole of it."""
        return Grammar(
            "\n".join([f"start: {start}", *(f"{head}: {body}" for body, head in self._lines.items())]) + "\n"
        )

    def _name(self, letter: str, options: str, expression: str) -> str:
        name = self._lines.setdefault(expression, f"{letter}{len(self._lines)}{options}")
        return name.removesuffix(options)


def alternatives(expressions: Iterable[str]) -> str:
    """One of these."""
    return f"({' | '.join(expressions)})"


def regex(pattern: str) -> str:
    """A regular expression as Lark writes it."""
    return f"/{_SLASH.sub(_slashed, pattern)}/"


def escaped(text: str) -> str:
    """A text as a regular expression."""
    return _REGEX_SPECIALS.sub(r"\\\g<0>", text)


def _to_lark(grammar: str) -> str:
    """A client's Lark or GBNF as Lark."""
    try:
        return any_to_lark(grammar)
    except Exception as error:
        # llguidance raises Exception itself for a rule that is not there, and what Python does for nesting too deep.
        raise InvalidRequest("response_format", f"the grammar is neither Lark nor GBNF: {error}") from error


def _slashed(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found.group(), found.group())
