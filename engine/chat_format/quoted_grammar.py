r"""Converts a grammar of texts into the grammar of their JSON strings: `"` becomes `\"`, a line break `\n`.

The lexer of llguidance is greedy and never backtracks. All escapes begin with a backslash, so an escape after a
terminal must not look like a continuation of it: terminals become rules in which each escape is a separate terminal.
llguidance itself finds the characters of a class that JSON escapes.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.errors import InvalidRequest

_ESCAPED = ('"', "\\", *map(chr, range(0x20)))
_UNESCAPED = r'[^"\\\x00-\x1f]'

_LARK_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |"(?P<first>(?:\\.|[^"\\\n])+)"\.\."(?P<last>(?:\\.|[^"\\\n])+)"
    |(?P<string>"(?:\\.|[^"\\\n])*")(?P<case>i?)
    |/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[imslux]*)
    |"(?:\\.|[^"\\\n])*+|/(?:\\.|[^/\\\n])*+    # unclosed: one match to the end of the line, in linear time
    |%import\s+common\.(?P<name>\w+)(?:\s*->\s*(?P<alias>\w+))?
    |%import\s+common\s*\((?P<names>[\w\s,]+)\)
    |%ignore\s+(?P<ignored>[^\n]+)
    |(?P<foreign>%\w+|<[^\s<>]+>|&|~(?!\s*\d))
    |(?P<word>\b_?[A-Z][A-Z0-9_]*\b)""",
    re.VERBOSE,
)
_CLASS = r"\[(?:\\.|\[(?:\\.|[^\]\\])*\]|(?<=\[)\]|(?<=\[\^)\]|[^\]\\\[])*\]"
_ATOM = re.compile(
    rf"""(?P<characters>{_CLASS}|\\(?:[xuU]\{{[^}}]*\}}|x..|u.{{4}}|U.{{8}}|[pP]\{{[^}}]*\}}|[pP].|.))
    |(?P<group>\((?:\?:|\?P?<\w+>)?(?!\?))
    |(?P<operator>[|)]|[*+?]|\{{\d+(?:,\d*)?\}})
    |(?P<foreign>[\^$(])
    |(?P<character>.)""",
    re.VERBOSE | re.DOTALL,
)
_REPEATED = re.compile(rf"\(?(?P<characters>{_CLASS}|\\.|\.)(?P<times>[*+])\)?", re.DOTALL)
# llguidance's common terminals with characters that JSON escapes, and some without.
_COMMON = {"CR": r"\r", "LF": r"\n", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+"}
_NAMES = (
    "DIGIT HEXDIGIT INT SIGNED_INT DECIMAL FLOAT NUMBER SIGNED_NUMBER SIGNED_FLOAT LCASE_LETTER UCASE_LETTER LETTER "
    "WORD CNAME"
)
_UNESCAPED_TERMINALS = frozenset(_NAMES.split())


def quoted_grammar(source: str) -> str:
    """The Lark grammar of the JSON strings (without quotes) for the texts of the grammar `source`.

    Raises InvalidRequest for constructs without an equivalent: JSON, special tokens, "&" and "~" between terminals.
    """
    return _LARK_TOKEN.sub(_convert, source)


def _convert(match: re.Match[str]) -> str:
    """A terminal as an expression for rules; the name of a terminal as the name of a rule."""
    parts = match.groupdict()
    if parts["first"]:
        return _expression(f"[{_bounds(parts['first'])}-{_bounds(parts['last'])}]", "")
    if parts["string"] is not None:
        return _string(parts["string"], parts["case"])
    if parts["regex"]:
        return _expression(parts["regex"], parts["flags"])
    if parts["name"] or parts["names"]:
        names = [parts["name"]] if parts["name"] else re.findall(r"\w+", parts["names"])
        return "\n".join(_imported(name, parts["alias"] or name) for name in names)
    if parts["ignored"]:
        return _ignored(parts["ignored"].strip())
    if parts["foreign"]:
        raise _unquotable(f"'{parts['foreign']}'")
    return _rule(parts["word"]) if parts["word"] else match.group()


def _rule(terminal: str) -> str:
    """Name of the rule for a terminal."""
    return f"terminal_{terminal.lower()}"


def _bounds(text: str) -> str:
    return re.escape(str(json.loads(f'"{text}"')))


def _string(literal: str, case: str) -> str:
    # JSON has no \x41; it has all other escapes of Lark.
    text = str(json.loads(re.sub(r"\\x(..)", r"\\u00\1", literal)))
    segments = re.findall(r'["\\\x00-\x1f]|[^"\\\x00-\x1f]+', text)
    written = [_escape(segment) if segment in _ESCAPED else f"{json.dumps(segment)}{case}" for segment in segments]
    return f"({' '.join(written)})" if len(written) > 1 else "".join(written) or '""'


def _escape(character: str) -> str:
    """The JSON escape of a character, as a Lark string."""
    return json.dumps(json.dumps(character)[1:-1])


def _imported(name: str, alias: str) -> str:
    if name in _UNESCAPED_TERMINALS:
        return f"%import common.{name}\n{_rule(alias)}: {name}"
    if name not in _COMMON:
        raise _unquotable(f"'common.{name}'")
    return f"{_rule(alias)}: {_expression(_COMMON[name], '')}"


def _ignored(construct: str) -> str:
    """%ignore for each character of an ignored terminal."""
    repeated = _REPEATED.fullmatch(_COMMON.get(construct, construct[1:-1]))
    if repeated is None or (construct not in _COMMON and not construct.startswith("/")):
        raise _unquotable(f"'%ignore {construct}'")
    characters, other = _members(repeated["characters"])
    return "\n".join(f"%ignore {terminal}" for terminal in [*map(_escape, characters), *other])


def _expression(regex: str, flags: str) -> str:
    """A regular expression as an expression for rules."""
    flags = "".join(flag for flag in flags if flag in "isx")
    repeated = _REPEATED.fullmatch(regex)
    if repeated is not None and "x" not in flags:
        # Characters between two escapes are one terminal, as greedy as the original.
        escapes, other = _members(_dotted(repeated["characters"], flags))
        runs = [f"{terminal[:-1]}+/{flags}" for terminal in other]
        return f"({' | '.join([*map(_escape, escapes), *runs])}){repeated['times']}"
    written = list(_atoms(regex, flags))
    if any(part.startswith(('"\\\\', "(")) and part != "(" for part in written):
        return f"({' '.join(written)})"
    # No characters that JSON escapes: the terminal is unchanged.
    return f"/{regex}/{flags}"


def _atoms(regex: str, flags: str) -> Iterator[str]:
    """Characters and classes as terminals, one by one, with groups and repetitions between them."""
    if "x" in flags:
        raise _unquotable("the flag 'x'")
    for match in _ATOM.finditer(regex):
        if match["foreign"]:
            raise _unquotable(f"'{match['foreign']}' of a regular expression")
        if match["group"]:
            yield "("
        elif match["operator"]:
            yield match["operator"]
        else:
            escapes, other = _members(_dotted(match.group(), flags))
            options = [*map(_escape, escapes), *(f"{terminal}{flags}" for terminal in other)]
            yield options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _dotted(characters: str, flags: str) -> str:
    return "(?s:.)" if characters == "." and "s" in flags else characters


@functools.lru_cache(1024)
def _members(characters: str) -> tuple[list[str], list[str]]:
    """The JSON-escaped characters of a character class, and a terminal of its other characters, if any."""
    matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_regex(characters), log_level=0)
    if matcher.is_error():
        raise InvalidRequest("grammar", f"'{characters}' is not a supported character class")
    allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:256]
    members = [character for character in _ESCAPED if allowed[ord(character)]]
    if int(allowed.sum()) == len(members):
        return members, []
    if characters in (".", "(?s:.)"):
        return members, [f"/{_UNESCAPED}/"]
    if not members:
        return members, [f"/{_slashed(characters)}/"]
    return members, [f"/[{_slashed(characters)}&&{_UNESCAPED}]/"]


@functools.lru_cache(1)
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _slashed(characters: str) -> str:
    return r"\/" if characters == "/" else characters


def _unquotable(construct: str) -> InvalidRequest:
    return InvalidRequest("grammar", f"this model writes the input as JSON, and {construct} is not supported there")
