"""Who may come in. Every path needs a key but for the two that a load balancer asks: new routes start closed."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import INVALID_API_KEY, ApiError, reply

# Compared with scope["path"] as it is: no prefix, no case folding, no URL object rebuilt from the Host header
# (CVE-2026-48710 was that).
OPEN_PATHS = frozenset({"/health", "/ready"})
# The name of a request's key in its state.
OWNER = "owner"


class Auth:
    """Pure ASGI: answers 401 itself, passes on the rest. Without keys everything passes."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode("utf-8")) for key in keys]
        self._several = len({*self._digests}) > 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in, or answer that it needs a key."""
        if scope["type"] not in ("http", "websocket") or self._may_pass(scope):
            self._name_owner(scope)
            await self.app(scope, receive, send)
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

    def _name_owner(self, scope: Scope) -> None:
        """Add the name of the key to the request's state, in the scope itself: outer layers read the route there."""
        presented = list(_presented(scope)) if self._several and scope["type"] in ("http", "websocket") else []
        if len(presented) == 1:
            # Of the digest as much as tells keys apart: it is written down beside what belongs to it.
            scope.setdefault("state", {})[OWNER] = _digest(b"owner " + presented[0]).hex()[:16]

    def _knows(self, key: bytes) -> bool:
        # Digests have one length, and all of them are compared, so that the time says nothing about the keys.
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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
