"""The strict JSON parser: equal to json.loads for strict JSON, in linear time."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.http.errors import ApiError
from server.http.parsing import loads

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


# The first text of hypothesis in a process takes seconds.
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), values, max_size=5))
def test_valid_json_is_parsed_as_by_python(value: dict[str, object]) -> None:
    """Any JSON object is parsed unchanged."""
    assert value == loads(json.dumps(value).encode())
    assert value == loads(json.dumps(value, ensure_ascii=False).encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_an_api_error(body: bytes) -> None:
    with contextlib.suppress(ApiError):
        assert isinstance(loads(body), dict)


def test_brackets_in_strings_add_no_depth() -> None:
    """Also behind escaped quotes."""
    text = '\\"' + "[" * 100

    assert {"a": text} == loads(json.dumps({"a": text}).encode())


@pytest.mark.parametrize("levels", [1, 63, 64])
def test_depth_is_allowed_up_to_the_limit(levels: int) -> None:
    """64 levels, the outermost included."""
    inner = "[" * (levels - 1) + "]" * (levels - 1)

    assert 1 == len(loads(f'{{"a": {inner or 1}}}'.encode()))


def test_surrogate_pairs_are_characters() -> None:
    assert {"a": "\U0001f600"} == loads(rb'{"a": "\ud83d\ude00"}')


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "' + b'\\"' * 300_000,
        b'{"a": "' + b"\\" * 1_000_000,
        b'{"a": [' + b"[],{}," * 200_000 + b"1]}",
        b"{" + b",".join(b'"%d":1' % number for number in range(100_000)) + b',"99999":2}',
        b'{"a":' + b"9" * 1_000_000 + b"}",
        b'{"a":"' + b"\\u0041" * 150_000 + b'"}',
    ],
    ids=["quotes", "backslashes", "brackets", "late twin", "digits", "escapes"],
)
def test_hostile_megabytes_take_linear_time(body: bytes) -> None:
    """A megabyte that is slow for a backtracking or quadratic parser."""
    begin = time.process_time()
    with contextlib.suppress(ApiError):
        loads(body)

    assert time.process_time() - begin < 3
