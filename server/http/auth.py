"""Who may come in. Every path needs a key but for the two that a load balancer asks: new routes start closed."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.errors import INVALID_API_KEY, ApiError, error_response
from server.settings import split_organisation

# Compared with scope["path"] as it is: no prefix, no case folding, no URL object rebuilt from the Host header
# (CVE-2026-48710 was that).
OPEN_PATHS = frozenset({"/health", "/ready"})
# The name of a request's key in its state.
OWNER_KEY = "owner"


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
_current_caller: ContextVar[Caller] = ContextVar("caller", default=_ANONYMOUS)


class AuthMiddleware:
    """Pure ASGI: answers 401 itself, passes on the rest. Without keys everything passes.

    keys  `key`, or `organisation:key`; keys of one organisation are one owner
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self.app = app
        self._owners = dict(_owners_of(tuple(keys)))
        self._digests = list(self._owners)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in, or answer that it needs a key."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        if self._is_authorized(scope):
            state = scope.setdefault("state", {})
            state[OWNER_KEY] = self._owner(scope)
            token = _current_caller.set(Caller(state[OWNER_KEY], str(state.get("request_id", ""))))
            try:
                await self.app(scope, receive, send)
            finally:
                _current_caller.reset(token)
            return
        message = "Incorrect API key provided." if any(_credentials(scope)) else "You didn't provide an API key."
        error = ApiError(INVALID_API_KEY, message, headers={"WWW-Authenticate": "Bearer"})
        await error_response(error, scope["path"])(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        if not self._digests or scope["path"] in OPEN_PATHS:
            return True
        presented = list(_credentials(scope))
        # Two credentials in one request: a proxy and we might read different ones.
        return len(presented) == 1 and self._is_valid(presented[0])

    def _owner(self, scope: Scope) -> str:
        presented = list(_credentials(scope))
        return self._owners.get(_digest(presented[0]), "") if len(presented) == 1 else ""

    def _is_valid(self, key: bytes) -> bool:
        # Digests have one length, and all of them are compared, so that the time says nothing about the keys.
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _owners_of(keys: Sequence[str]) -> Iterator[tuple[bytes, str]]:
    """The digest of each key, and the owner of the key."""
    alone = len({*keys}) == 1
    for entry in keys:
        organisation, key = split_organisation(entry)
        if organisation:
            owner = _owner_id(b"organisation " + organisation.encode())
            # The entry opens as a whole too: it may be a key that has a colon in it.
            yield from ((_digest(text.encode()), owner) for text in (entry, key))
        else:
            yield _digest(key.encode()), "" if alone else _owner_id(b"owner " + key.encode())


def _owner_id(owner: bytes) -> str:
    # Of the digest as much as tells owners apart: it is written down beside what belongs to them.
    return _digest(owner).hex()[:16]


def _credentials(scope: Scope) -> Iterator[bytes]:
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            yield key.strip() if scheme.lower() == b"bearer" else b""


def owner(request: HTTPConnection) -> str:
    """Whose key a request came with, where there are several; "": there is one, or none."""
    return str(getattr(request.state, OWNER_KEY, ""))


def caller() -> Caller:
    """The client of the current HTTP request."""
    return _current_caller.get()
