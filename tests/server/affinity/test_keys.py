"""Routing keys of requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.affinity.keys import (
    LARGEST_PARSED,
    LONGEST_PREFIX,
    RequestKeys,
    keys_of_bytes,
    request_keys,
    session_key,
)

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)
FIELDS = ("model", "messages", "input", "prompt", "system", "tools", "conversation", "cache_salt", "prompt_cache_key")


def message(role: str, content: Any) -> dict[str, Any]:
    """One message of a chat."""
    return {"role": role, "content": content}


def turns(system: str, *texts: str) -> dict[str, Any]:
    """The body of a chat with alternating messages of the user and the assistant."""
    messages = [message(("user", "assistant")[index % 2], text) for index, text in enumerate(texts)]
    return {"model": "m", "messages": [message("system", system), *messages]}


@given(st.text(max_size=2000), st.lists(st.text(max_size=800), min_size=1, max_size=7))
def test_the_turns_of_a_conversation_share_its_key_and_their_prefixes(system: str, texts: list[str]) -> None:
    """A later turn has the conversation key of the first, and all its prefix keys but longer ones."""
    first, last = request_keys(turns(system, texts[0])), request_keys(turns(system, *texts))

    assert first.conversation == last.conversation != ""
    assert first.prefixes == last.prefixes[len(last.prefixes) - len(first.prefixes) :]


def test_other_first_messages_are_other_conversations_with_the_prefixes_of_their_system_prompt() -> None:
    """A system prompt of 3,000 characters gives four common keys, of 256 to 2,048 characters."""
    system = "s" * 3000
    one, other = request_keys(turns(system, "a" * 2000)), request_keys(turns(system, "b" * 2000))

    assert one.conversation != other.conversation
    assert 5 == len(one.prefixes)
    assert one.prefixes[1:] == other.prefixes[1:]
    assert one.prefixes[0] != other.prefixes[0]


def test_a_system_prompt_longer_than_the_longest_prefix_leaves_conversations_apart() -> None:
    """The first message of the user counts behind any system prompt."""
    system = "s" * 2 * LONGEST_PREFIX

    assert request_keys(turns(system, "a")).conversation != request_keys(turns(system, "b")).conversation
    assert request_keys(turns(system, "a")).prefixes == request_keys(turns(system, "b")).prefixes


@pytest.mark.parametrize("field", ["model", "cache_salt", "tools", "instructions", "system"])
def test_fields_before_the_messages_separate_keys(field: str) -> None:
    """Prompts of other models, salts, tools or instructions share no cache."""
    body = turns("s" * 600, "hello")
    one, other = request_keys({**body, field: "one"}), request_keys({**body, field: "two"})

    assert one.conversation != other.conversation
    assert not set(one.prefixes) & set(other.prefixes)


def test_owners_separate_keys() -> None:
    """Owners share no cache, even with one session."""
    body = turns("s" * 600, "hello")
    one, other = (request_keys(body, session="same", owner=owner) for owner in ("one", "two"))

    assert one.conversation != other.conversation
    assert not set(one.prefixes) & set(other.prefixes)


@pytest.mark.parametrize(
    "fields",
    [{"conversation": "x"}, {"conversation": {"id": "x"}}, {"previous_response_id": "x"}],
)
def test_an_explicit_session_is_the_conversation(fields: dict[str, Any]) -> None:
    """A header stands above the fields of the body."""
    body = {**turns("s", "hello"), **fields}

    assert session_key("x") == request_keys(body).conversation
    assert session_key("y") == request_keys(body, session="y").conversation


def test_a_prompt_cache_key_separates_conversations_and_does_not_join_them() -> None:
    """Applications use one for a conversation, or one for all of their requests."""
    keys = [request_keys({**turns("s", text), "prompt_cache_key": name}).conversation for text in "ab" for name in "xy"]

    assert 4 == len(set(keys))
    assert keys[0] == request_keys({**turns("s", "a", "b", "c"), "prompt_cache_key": "x"}).conversation


def test_the_text_of_the_responses_api_is_the_first_message() -> None:
    """`input` as a text and as a list of messages begin a conversation."""
    texts = [request_keys({"input": text}).conversation for text in ("a", "b")]

    assert texts[0] != texts[1]
    assert texts[0] == request_keys({"input": [message("user", "a"), message("assistant", "b")]}).conversation


def test_a_plain_prompt_has_prefixes_and_no_conversation() -> None:
    """Completions continue any text; token IDs are hashed, too."""
    text, ids = request_keys({"prompt": "a" * 600}), request_keys({"prompt": [*range(600)]})

    assert ("", 2) == (text.conversation, len(text.prefixes))
    assert ("", 4) == (ids.conversation, len(ids.prefixes))


def test_a_large_body_is_hashed_unparsed() -> None:
    """Its turns share their keys, and no more than LONGEST_PREFIX bytes of it count."""
    media = "x" * LARGEST_PARSED
    bodies = [json.dumps(turns(media, *texts)).encode() for texts in (("a",), ("a", "b", "c"))]
    first, last = map(keys_of_bytes, bodies)

    assert first == last
    assert first.conversation != ""
    assert 9 == len(first.prefixes)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=400) | JSON_VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_have_keys(body: bytes) -> None:
    """A body that no server accepts has keys, too."""
    assert keys_of_bytes(body) == keys_of_bytes(body)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES))
def test_any_values_of_fields_have_keys(body: dict[str, Any]) -> None:
    """A body is not validated, and bytes and values give the same keys."""
    keys = request_keys(body)

    assert keys == keys_of_bytes(json.dumps(body).encode())
    assert isinstance(keys, RequestKeys)


def test_a_deeply_nested_body_has_keys() -> None:
    """The JSON parser refuses the nesting."""
    assert RequestKeys(prefixes=keys_of_bytes(b"[" * 10_000).prefixes) == keys_of_bytes(b"[" * 10_000)
