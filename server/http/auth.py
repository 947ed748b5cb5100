"""Who may come in. Every path needs a key but for the two that a load balancer asks: new routes start closed."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.errors import INVALID_API_KEY, ApiError, reply
from server.settings import named_key

# Compared with scope["path"] as it is: no prefix, no case folding, no URL object rebuilt from the Host header
# (CVE-2026-48710 was that).
OPEN_PATHS = frozenset({"/health", "/ready"})
# The name of a request's key in its state.
OWNER = "owner"


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of an HTTP request.

    owner    the organisation of its key, or the key; "": all requests belong to one owner
    request  the id of the HTTP request
    """

    owner: str = ""
    request: str = ""


_ANONYMOUS = Caller()
# Tasks and worker threads of a request inherit it, so that it reaches the engine from every route.
_CALLER: ContextVar[Caller] = ContextVar("caller", default=_ANONYMOUS)


class Auth:
    """Pure ASGI: answers 401 itself, passes on the rest. Without keys everything passes.

    keys  `key`, or `organisation:key`; keys of one organisation are one owner
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self.app = app
        self._owners = dict(_owned(tuple(keys)))
        self._digests = list(self._owners)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in, or answer that it needs a key."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        if self._may_pass(scope):
            state = scope.setdefault("state", {})
            state[OWNER] = self._owner(scope)
            token = _CALLER.set(Caller(state[OWNER], str(state.get("request_id", ""))))
            try:
                await self.app(scope, receive, send)
            finally:
                _CALLER.reset(token)
            return
        message = "Incorrect API key provided." if any(_presented(scope)) else "You didn't provide an API key."
        error = ApiError(INVALID_API_KEY, message, headers={"WWW-Authenticate": "Bearer"})
        await reply(error, scope["path"])(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if not self._digests or scope["path"] in OPEN_PATHS:
            return True
        presented = list(_presented(scope))
        # Two credentials in one request: a proxy and we might read different ones.
        return len(presented) == 1 and self._knows(presented[0])

    def _owner(self, scope: Scope) -> str:
        presented = list(_presented(scope))
        return self._owners.get(_digest(presented[0]), "") if len(presented) == 1 else ""

    def _knows(self, key: bytes) -> bool:
        # Digests have one length, and all of them are compared, so that the time says nothing about the keys.
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _owned(keys: Sequence[str]) -> Iterator[tuple[bytes, str]]:
    """The digest of each key, and the owner of the key."""
    alone = len({*keys}) == 1
    for entry in keys:
        organisation, key = named_key(entry)
        if organisation:
            owner = _name(b"organisation " + organisation.encode())
            # The entry opens as a whole too: it may be a key that has a colon in it.
            yield from ((_digest(text.encode()), owner) for text in (entry, key))
        else:
            yield _digest(key.encode()), "" if alone else _name(b"owner " + key.encode())


def _name(owner: bytes) -> str:
    # Of the digest as much as tells owners apart: it is written down beside what belongs to them.
    return _digest(owner).hex()[:16]


def _presented(scope: Scope) -> Iterator[bytes]:
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            yield key.strip() if scheme.lower() == b"bearer" else b""


def owner(request: HTTPConnection) -> str:
    """Whose key a request came with, where there are several; "": there is one, or none."""
    return str(getattr(request.state, OWNER, ""))


def caller() -> Caller:
    """The client of the current HTTP request."""
    return _CALLER.get()
