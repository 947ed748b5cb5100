"""Routing keys of a request: of its conversation, and of the prefixes of its prompt.

The text of a prompt is hashed once, in prompt order, and its prefixes are keyed at doubling lengths: two prompts have
the same key of a length if their text is equal up to it. The turns of a conversation have one conversation key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

# The header of an explicit conversation; vLLM's router and Ray Serve use the same.
SESSION_HEADER = "x-session-id"
# Characters of the prefixes that have keys: 256, 512, ... 65,536. A shorter one costs less than a step of decoding.
SHORTEST_PREFIX, LONGEST_PREFIX = 256, 1 << 16
# Bytes of a body that is parsed; a longer one, with its media, is hashed up to LONGEST_PREFIX.
LARGEST_PARSED = 1 << 20
# Texts of the first user message in the conversation key.
PARTS = 64
# Fields of the APIs before the messages, in prompt order; cache_salt separates caches.
HEAD = ("model", "cache_salt", "tools", "instructions", "system")
MESSAGES = ("messages", "input", "prompt")
# Fields that name a conversation explicitly.
SESSIONS = ("conversation", "previous_response_id")


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """Keys of one request.

    conversation  equal for all turns of a conversation; "" if the request has none
    prefixes      keys of the prompt's prefixes at doubling lengths, the longest first
    """

    conversation: str = ""
    prefixes: tuple[str, ...] = ()


def keys_of_bytes(body: bytes, *, session: str = "", owner: str = "") -> RequestKeys:
    """Keys of an HTTP body; of its first bytes if it is no JSON object or longer than LARGEST_PARSED."""
    parsed = _parse(body) if len(body) <= LARGEST_PARSED else None
    if isinstance(parsed, dict):
        return request_keys(parsed, session=session, owner=owner)
    hasher = PrefixHasher(owner)
    hasher.add_all((body[:LONGEST_PREFIX].decode("utf-8", "replace"),))
    # The first message of a conversation stands in the first bytes, and is complete where the hasher is full.
    conversation = session_key(hasher.digest(), owner) if hasher.full else ""
    return RequestKeys(session_key(session, owner) if session else conversation, hasher.prefixes())


def request_keys(body: Mapping[str, Any], *, session: str = "", owner: str = "") -> RequestKeys:
    """Keys of a parsed body of the chat, completions, responses or messages API.

    session  value of SESSION_HEADER
    owner    scope of the cache, such as the API key; keys of different owners differ
    """
    hasher = PrefixHasher(owner)
    hasher.add_all(chain.from_iterable((name, *texts(body[name])) for name in HEAD if body.get(name)))
    conversation = ""
    for message in _messages(body):
        if not conversation and isinstance(message, dict) and message.get("role") == "user":
            # A prompt_cache_key names a conversation, or all of an application: the first message counts, too.
            beginning = "\0".join((str(body.get("prompt_cache_key")), *islice(texts(message.get("content")), PARTS)))
            conversation = session_key(f"{hasher.digest()}{beginning[:LONGEST_PREFIX]}", owner)
        hasher.add_all(texts(message))
        if hasher.full and conversation:
            break
    named = session or _named_session(body)
    return RequestKeys(session_key(named, owner) if named else conversation, hasher.prefixes())


def session_key(session: str, owner: str = "") -> str:
    """The conversation key of an explicit session, such as the ID of a response that the next request continues."""
    text = f"{owner}\0{session}".encode("utf-8", "surrogatepass")
    return f"c{blake2b(text, digest_size=8).hexdigest()}"


def _parse(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _messages(body: Mapping[str, Any]) -> Iterator[object]:
    """The messages of a body; the text of the responses API is one of the user."""
    for name in MESSAGES:
        content = body.get(name)
        if isinstance(content, list):
            yield from content
        elif isinstance(content, str):
            yield {"role": "user", "content": content} if name == "input" else content


def _named_session(body: Mapping[str, Any]) -> str:
    values = (body.get(name) for name in SESSIONS)
    # The responses API has a conversation as an ID or as an object with one.
    names = (value.get("id") if isinstance(value, dict) else value for value in values)
    return next((name for name in names if isinstance(name, str) and name), "")


def texts(value: object) -> Iterator[str]:
    """All strings and numbers of a JSON value in document order, as text."""
    pending = [value]
    while pending:
        match pending.pop():
            case str() as text:
                yield text
            case dict() as fields:
                pending.extend(reversed([part for item in fields.items() for part in item]))
            case list() as items:
                pending.extend(reversed(items))
            case other:
                yield str(other)


class PrefixHasher:
    """Hashes up to LONGEST_PREFIX characters of text and keeps the digests at doubling lengths."""

    def __init__(self, owner: str) -> None:
        self._hash = blake2b(f"{owner}\0".encode("utf-8", "surrogatepass"), digest_size=8)
        self._length = 0
        self._next = SHORTEST_PREFIX
        self._prefixes: list[str] = []

    @property
    def full(self) -> bool:
        """Whether further text has no effect."""
        return self._length >= LONGEST_PREFIX

    def add_all(self, parts: Iterator[str] | tuple[str, ...]) -> None:
        """Add texts until the hasher is full; each is terminated, so their boundaries count."""
        added, missing = [], LONGEST_PREFIX - self._length
        for part in parts:
            if missing <= 0:
                break
            added.append(part[:missing])
            missing -= len(part) + 1
        self._add("\0".join((*added, "")))

    def digest(self) -> str:
        """The digest of the text so far."""
        return self._hash.hexdigest()

    def prefixes(self) -> tuple[str, ...]:
        """The digests at doubling lengths, the longest first."""
        return tuple(reversed(self._prefixes))

    def _add(self, text: str) -> None:
        start = 0
        while start < len(text) and not self.full:
            stop = min(len(text), start + self._next - self._length)
            self._hash.update(text[start:stop].encode("utf-8", "surrogatepass"))
            self._length += stop - start
            start = stop
            if self._length == self._next:
                self._prefixes.append(self.digest())
                self._next *= 2
