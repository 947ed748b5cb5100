"""Long strings of a body bypass the JSON parser, and no client can tell."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.http import long_strings
from server.http.errors import ApiError
from server.http.long_strings import LONG_BYTES, put_back, take_long_strings
from server.http.parsing import JOINED_BYTES, StrictJsonError, decode, joined, loads, parse
from tests.server.test_loop_work import counting

LONG = "a" * LONG_BYTES


# For random strings, which are short.
SHORT = 3


def outcome(body: bytes, *, takes: bool) -> Any:
    """The value of a body, or "refused"; with long strings taken out or not."""
    try:
        short, strings = take_long_strings(body, SHORT) if takes else (body, {})
        return parse(decode(short), strings)
    except StrictJsonError:
        return "refused"


TEXTS = st.text(max_size=12) | st.text(alphabet='abc"\\\n/\x7f', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers(-5, 5) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_a_value_is_the_same(value: object, ascii_only: bool, indent: int | None) -> None:
    body = json.dumps({"value": value}, ensure_ascii=ascii_only, indent=indent).encode()

    assert outcome(body, takes=True) == {"value": value}


@given(
    st.text(alphabet='"""\\a\u00e9:,{}[] \n\x01u', max_size=40), st.sampled_from(["%s", '{"key":%s}', '["aaaa",%s]'])
)
def test_any_text_is_accepted_or_refused_alike(text: str, around: str) -> None:
    body = (around % text).encode()

    assert outcome(body, takes=True) == outcome(body, takes=False)


def test_the_parser_sees_placeholders() -> None:
    """Of images in objects and in lists; of keys, escapes and other characters it sees the text."""
    value = {
        "url": LONG,
        "images": [LONG + "b", [LONG + "c"]],
        LONG: 1,
        "escaped": LONG + "\n",
        "text": LONG + "\u00e9",
    }
    body = json.dumps(value, ensure_ascii=False).encode()
    short, strings = take_long_strings(body)

    assert sorted(strings.values()) == [LONG, LONG + "b", LONG + "c"]
    assert len(short) < len(body) - 3 * LONG_BYTES + 200
    assert put_back(json.loads(short), strings) == value
    assert loads(body) == value


def test_a_client_cannot_name_a_placeholder() -> None:
    """It is another one for each body."""
    body = json.dumps({"url": LONG}).encode()

    assert take_long_strings(body)[0] != take_long_strings(body)[0]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a":"%b","b":"\xff"}' % LONG.encode(), f"not UTF-8 at byte {LONG_BYTES + 13}."),
        (b'{"a":"%b","b":1,"b":2}' % LONG.encode(), "the key 'b' is duplicate."),
        (b'{"%b":1,"%b":2}' % (LONG.encode(), LONG.encode()), "is duplicate."),
        (b'{"%b" :1,"%b"%b:2}' % (LONG.encode(), LONG.encode(), b" " * 100), "is duplicate."),
        (b'{"a":"%b\x01"}' % LONG.encode(), "Invalid control character at"),
        (b'{"a":"%b"' % LONG.encode(), "Expecting ',' delimiter."),
    ],
)
def test_errors_are_those_of_the_whole_body(body: bytes, reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        loads(body)

    assert reason in caught.value.message


def test_the_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a body with many strings or escapes is left to the parser's limits."""
    monkeypatch.setattr(long_strings, "MAX_STEPS", 8)
    for first in ("x", "\\n" * 9):
        many = ",".join([f'"{first}"'] * 9)
        body = f'["{LONG}",{many},"{LONG}"]'.encode()
        short, strings = take_long_strings(body)

        assert [*strings.values()] == [LONG]
        assert parse(decode(short), strings) == json.loads(body)


@pytest.mark.parametrize("pieces", [1, 3])
def test_pieces_of_a_large_body_are_joined_off_the_loop(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """Only if there are several: a single one is not copied."""
    calls = counting(monkeypatch, anyio.to_thread, "run_sync")

    assert asyncio.run(joined([b"x" * JOINED_BYTES] * pieces)) == b"x" * JOINED_BYTES * pieces
    assert len(calls) == (pieces > 1)
