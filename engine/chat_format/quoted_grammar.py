"""A grammar of texts as a grammar of what JSON writes for them between quotes: `"` becomes `\\"`, a line break `\\n`.

A lexer reads as much as it can and never gives back. All escapes begin with the same letter, so one that follows a
terminal must not look like more of it: terminals become rules, in which every escape is a terminal of its own. What a
class of letters holds of the characters that JSON escapes, llguidance itself says.
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
_PLAIN = r'[^"\\\x00-\x1f]'

_PIECE = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |"(?P<first>(?:\\.|[^"\\\n])+)"\.\."(?P<last>(?:\\.|[^"\\\n])+)"
    |(?P<string>"(?:\\.|[^"\\\n])*")(?P<case>i?)
    |/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[imslux]*)
    |%import\s+common\.(?P<name>\w+)(?:\s*->\s*(?P<alias>\w+))?
    |%import\s+common\s*\((?P<names>[\w\s,]+)\)
    |%ignore\s+(?P<ignored>[^\n]+)
    |(?P<foreign>%\w+|<[^\s<>]+>|&|~(?!\s*\d))
    |(?P<word>\b_?[A-Z][A-Z0-9_]*\b)""",
    re.VERBOSE,
)
_CLASS = r"\[(?:\\.|\[(?:\\.|[^\]\\])*\]|(?<=\[)\]|(?<=\[\^)\]|[^\]\\\[])*\]"
_ATOM = re.compile(
    rf"""(?P<letters>{_CLASS}|\\(?:[xuU]\{{[^}}]*\}}|x..|u.{{4}}|U.{{8}}|[pP]\{{[^}}]*\}}|[pP].|.))
    |(?P<group>\((?:\?:|\?P?<\w+>)?(?!\?))
    |(?P<operator>[|)]|[*+?]|\{{\d+(?:,\d*)?\}})
    |(?P<foreign>[\^$(])
    |(?P<letter>.)""",
    re.VERBOSE | re.DOTALL,
)
_REPEATED = re.compile(rf"\(?(?P<letters>{_CLASS}|\\.|\.)(?P<times>[*+])\)?", re.DOTALL)
# llguidance's own terminals that hold what JSON escapes, and some that do not.
_COMMON = {"CR": r"\r", "LF": r"\n", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+"}
_NAMES = (
    "DIGIT HEXDIGIT INT SIGNED_INT DECIMAL FLOAT NUMBER SIGNED_NUMBER SIGNED_FLOAT LCASE_LETTER UCASE_LETTER LETTER "
    "WORD CNAME"
)
_UNESCAPED_TERMINALS = frozenset(_NAMES.split())


def quoted_grammar(source: str) -> str:
    """The Lark grammar of what JSON writes for the texts of the grammar `source`.

    Raises InvalidRequest where it uses what has no such image: JSON, special tokens, "&" and "~" between terminals.
    """
    return _PIECE.sub(_piece, source)


def _piece(found: re.Match[str]) -> str:
    """A terminal as an expression for rules, and its name as the name of a rule."""
    parts = found.groupdict()
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
    return _rule(parts["word"]) if parts["word"] else found.group()


def _rule(terminal: str) -> str:
    """The name of the rule that a terminal becomes."""
    return f"terminal_{terminal.lower()}"


def _bounds(text: str) -> str:
    return re.escape(str(json.loads(f'"{text}"')))


def _string(literal: str, case: str) -> str:
    # JSON has no \x41; the rest of Lark's escapes it has.
    text = str(json.loads(re.sub(r"\\x(..)", r"\\u00\1", literal)))
    pieces = re.findall(r'["\\\x00-\x1f]|[^"\\\x00-\x1f]+', text)
    written = [_escape(piece) if piece in _ESCAPED else f"{json.dumps(piece)}{case}" for piece in pieces]
    return f"({' '.join(written)})" if len(written) > 1 else "".join(written) or '""'


def _escape(letter: str) -> str:
    """What JSON writes for it, as a string of Lark."""
    return json.dumps(json.dumps(letter)[1:-1])


def _imported(name: str, alias: str) -> str:
    if name in _UNESCAPED_TERMINALS:
        return f"%import common.{name}\n{_rule(alias)}: {name}"
    if name not in _COMMON:
        raise _unquotable(f"'common.{name}'")
    return f"{_rule(alias)}: {_expression(_COMMON[name], '')}"


def _ignored(what: str) -> str:
    """What may stand between terminals, letter by letter."""
    repeated = _REPEATED.fullmatch(_COMMON.get(what, what[1:-1]))
    if repeated is None or (what not in _COMMON and not what.startswith("/")):
        raise _unquotable(f"'%ignore {what}'")
    letters, bare = _members(repeated["letters"])
    return "\n".join(f"%ignore {terminal}" for terminal in [*map(_escape, letters), *bare])


def _expression(regex: str, flags: str) -> str:
    """A regular expression as an expression for rules."""
    flags = "".join(flag for flag in flags if flag in "isx")
    repeated = _REPEATED.fullmatch(regex)
    if repeated is not None and "x" not in flags:
        # The letters between two escapes are one terminal: as greedy as the whole of it was.
        escapes, bare = _members(_dotted(repeated["letters"], flags))
        runs = [f"{terminal[:-1]}+/{flags}" for terminal in bare]
        return f"({' | '.join([*map(_escape, escapes), *runs])}){repeated['times']}"
    written = list(_atoms(regex, flags))
    if any(part.startswith(('"\\\\', "(")) and part != "(" for part in written):
        return f"({' '.join(written)})"
    # Nothing that JSON escapes: the terminal stays what it was.
    return f"/{regex}/{flags}"


def _atoms(regex: str, flags: str) -> Iterator[str]:
    """Its letters as terminals, one by one, between brackets and what repeats them."""
    if "x" in flags:
        raise _unquotable("the flag 'x'")
    for found in _ATOM.finditer(regex):
        if found["foreign"]:
            raise _unquotable(f"'{found['foreign']}' of a regular expression")
        if found["group"]:
            yield "("
        elif found["operator"]:
            yield found["operator"]
        else:
            escapes, bare = _members(_dotted(found.group(), flags))
            options = [*map(_escape, escapes), *(f"{terminal}{flags}" for terminal in bare)]
            yield options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _dotted(letters: str, flags: str) -> str:
    return "(?s:.)" if letters == "." and "s" in flags else letters


@functools.lru_cache(1024)
def _members(letters: str) -> tuple[list[str], list[str]]:
    """What a class, given as a regular expression, holds that JSON escapes; and a terminal of the rest, if any is."""
    matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_regex(letters), log_level=0)
    if matcher.is_error():
        raise InvalidRequest("grammar", f"'{letters}' is no class of letters that can be followed")
    begun = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:256]
    members = [letter for letter in _ESCAPED if begun[ord(letter)]]
    if int(begun.sum()) == len(members):
        return members, []
    if letters in (".", "(?s:.)"):
        return members, [f"/{_PLAIN}/"]
    if not members:
        return members, [f"/{_slashed(letters)}/"]
    return members, [f"/[{_slashed(letters)}&&{_PLAIN}]/"]


@functools.lru_cache(1)
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _slashed(letters: str) -> str:
    return r"\/" if letters == "/" else letters


def _unquotable(what: str) -> InvalidRequest:
    return InvalidRequest("grammar", f"this model writes the input as JSON, and {what} cannot be followed in that")
