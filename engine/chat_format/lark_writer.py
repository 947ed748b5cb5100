"""Writes grammars in llguidance's variant of Lark; markers that are one token become terminals of that token.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. Terminals have upper-case names, rules lower-case
names. Terminals are greedy and never backtrack: text up to a marker of several tokens is one lazy rule with the marker,
and text without a marker is a terminal that excludes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.chat_format.message import AnswerConstraint
from engine.errors import InvalidRequest
from engine.types.request import Grammar

ANYTHING = "(?s:.)*"

# Compact JSON with at most the whitespace of json.dumps: fewer tokens, and no endless whitespace.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_SPACE = r"/[ \n]{1,2}/"
_REGEX_SPECIALS = re.compile(r"[\\.+*?()|\[\]{}^$]")
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
# A line of Lark that GBNF does not have. The expression of llguidance takes the square of a run of empty lines, and
# holds the interpreter lock.
_LARK = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start\s*+:)", re.MULTILINE)
# A conversion to Lark takes the square of the number of rules: 1.6 s of processor time at this length.
_MAX_GBNF_LENGTH = 64 * 2**10


class LarkWriter:
    """A grammar under construction. Methods return expressions for use in other rules.

    tokens  added tokens by their text
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._lines: dict[str, str] = {}

    def rule(self, expression: str, *, options: str = "") -> str:
        """Name of a new rule for `expression`."""
        return self._name("r", options, expression)

    def pattern(self, expression: str) -> str:
        """Name of a new terminal for `expression`, which consists of regular expressions."""
        return self._name("T", "", expression)

    def space(self) -> str:
        """Optional whitespace between parts."""
        return self.pattern(_SPACE) + "?"

    def plain_text(self, text: str) -> str:
        """`text` in ordinary tokens."""
        return json.dumps(text, ensure_ascii=False)

    def literal(self, text: str) -> str:
        """A marker, as one token if the vocabulary has it, else as ordinary tokens."""
        token = self._tokens.get(text)
        return self.plain_text(text) if token is None else f"<[{token}]>"

    def literals(self, *texts: str) -> str:
        """Markers in sequence, with optional whitespace between them."""
        return f" {self.space()} ".join(self.literal(text) for text in texts if text)

    def text(self, *without: str, patterns: Sequence[str] = (ANYTHING,)) -> str:
        """Text that contains none of the literals `without` and matches all of `patterns`."""
        excluded = "|".join(map(escaped, without))
        parts = [*map(regex, patterns), *([f"~{regex(f'{ANYTHING}({excluded}){ANYTHING}')}"] if excluded else [])]
        return self.pattern(" & ".join(parts))

    def until(self, literal: str, *, patterns: Sequence[str] = (ANYTHING,), before: str = "") -> str:
        """Text as in `text`, then `literal`; `before` precedes a literal of ordinary tokens."""
        text = self.text(literal, patterns=patterns)
        if literal in self._tokens:
            return f"{text} {self.literal(literal)}"
        return self.rule(f"{text} {self.plain_text(before + literal)}", options="[lazy]")

    def json(self, schema: Mapping[str, object], *, lenient: bool = False) -> str:
        """JSON that follows `schema`; lenient: unsupported keywords are ignored."""
        options = {**_COMPACT, **({"lenient": True} if lenient else {})}
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def constrained_text(self, constraint: AnswerConstraint) -> str:
        """The text of an answer under a client's constraint. Raises InvalidRequest."""
        match constraint.kind:
            case "json_schema":
                return self.json(json.loads(constraint.source), lenient=not constraint.strict)
            case "json_object":
                return self.json({"type": "object"})
            case "regex":
                return self.pattern(regex(constraint.source))
            case "choices":
                return alternatives(map(self.plain_text, constraint.choices))
            case "grammar":
                return self.nested(_to_lark(constraint.source))

    def nested(self, source: str) -> str:
        """Text that follows a separate Lark grammar."""
        return self.rule(f"%lark {{\n{source}\n}}")

    def grammar(self, start: str) -> Grammar:
        """The complete grammar."""
        lines = [f"start: {start}", *(f"{head}: {expression}" for expression, head in self._lines.items())]
        return Grammar("\n".join(lines) + "\n")

    def _name(self, prefix: str, options: str, expression: str) -> str:
        name = self._lines.setdefault(expression, f"{prefix}{len(self._lines)}{options}")
        return name.removesuffix(options)


def alternatives(expressions: Iterable[str]) -> str:
    """One of `expressions`."""
    return f"({' | '.join(expressions)})"


def regex(pattern: str) -> str:
    """A regular expression in Lark's notation."""
    return f"/{_SLASH.sub(_slashed, pattern)}/"


def escaped(text: str) -> str:
    """A regular expression that matches `text` only."""
    return _REGEX_SPECIALS.sub(r"\\\g<0>", text)


def _to_lark(grammar: str) -> str:
    """A client's Lark or GBNF grammar as Lark."""
    if _LARK.search(grammar):
        return grammar
    if len(grammar) > _MAX_GBNF_LENGTH:
        reason = f"a grammar in GBNF has {len(grammar)} characters, and the limit is {_MAX_GBNF_LENGTH}"
        raise InvalidRequest("response_format", reason)
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:
        # llguidance raises Exception itself for a missing rule, and RecursionError for deep nesting.
        raise InvalidRequest("response_format", f"the grammar is neither Lark nor GBNF: {error}") from error


def _slashed(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(match.group(), match.group())
