"""The routing keys of a request, in the header of Ray's session id: a router sees the headers of a request only."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace

from starlette.datastructures import Headers
from starlette.types import Scope

from server.affinity.aliases import ConversationAliases
from server.affinity.keys import SESSION_HEADER, RequestKeys, keys_of_bytes, session_key

# Of every response of a replica: its id. In a request: the id of the replica that has to answer, for its /metrics.
REPLICA_HEADER = "x-cellar-replica"
# Headers that Ray's proxy reads, in any spelling: by them clients could set its limits of time.
_RAY_HEADERS = frozenset(
    ("x_session_id", "serve_multiplexed_model_id", "x_request_timeout_seconds", "x_request_disconnect_disabled")
)
_request_id = re.compile(rb"[\x21-\x7e]{1,128}")
# A request for a replica by its id, in place of routing keys.
_TO_REPLICA = "replica:"
# The ID of a stored response: in the path of requests for it, and in the first bytes of the answer that creates it.
_response_path = re.compile(r"(?:/v1)?/responses(?:/(resp_[^/]+)|/|$)")
_response_id = re.compile(rb'"id": ?"(resp_[^"]+)"')


def encode_keys(keys: RequestKeys) -> str:
    """The keys as a header value; "" without keys."""
    return ",".join((keys.conversation, *keys.prefixes))


def decode_keys(value: str) -> RequestKeys:
    """The keys of a header value."""
    conversation, *prefixes = value.split(",")
    return RequestKeys(conversation, tuple(prefixes))


def requested_replica(value: str) -> str | None:
    """The replica of a header value without keys."""
    return value.removeprefix(_TO_REPLICA) if value.startswith(_TO_REPLICA) else None


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request with routing keys in place of the client's session.

    creates_response  whether the answer may have the ID of a new response
    """

    scope: Scope
    owner: str
    conversation: str
    creates_response: bool


class RequestRoutes:
    """Adds routing keys to requests, and keeps the conversations of responses. Belongs to the proxy's event loop."""

    def __init__(self) -> None:
        self._aliases = ConversationAliases()

    def route(self, scope: Scope, body: bytes) -> RoutedRequest:
        """The request with its keys. One for a response, or that continues it, has the keys of its conversation."""
        headers = Headers(raw=scope["headers"])
        owner = headers.get("authorization", "") or headers.get("x-api-key", "")
        path = _response_path.match(scope["path"])
        keys = self._keys(headers.get(SESSION_HEADER, ""), path, body, owner)
        replica = headers.get(REPLICA_HEADER, "")
        # Ray decodes headers as UTF-8.
        value = f"{_TO_REPLICA}{ascii(replica)[1:-1]}" if replica else encode_keys(keys)
        sent = [*_client_headers(scope), *([(SESSION_HEADER.encode(), value.encode())] if value else ())]
        return RoutedRequest({**scope, "headers": sent}, owner, keys.conversation, path is not None)

    def record(self, request: RoutedRequest, first: bytes) -> None:
        """Record the ID of a new response, from the first bytes of an answer."""
        match = _response_id.search(first) if request.creates_response else None
        if match is not None:
            self._aliases.add(session_key(match[1].decode("utf-8", "replace"), request.owner), request.conversation)

    def _keys(self, session: str, path: re.Match[str] | None, body: bytes, owner: str) -> RequestKeys:
        session = session or (path[1] if path else None) or ""
        keys = keys_of_bytes(body, session=session, owner=owner)
        if path and not keys.conversation:
            # Of an input without a message of the user, which later responses may continue.
            keys = replace(keys, conversation=session_key(secrets.token_hex(8), owner))
        return replace(keys, conversation=self._aliases.resolve(keys.conversation))


def _client_headers(scope: Scope) -> Iterator[tuple[bytes, bytes]]:
    """The headers of a request without those for Ray, and without an id that replicas do not accept."""
    for name, value in scope["headers"]:
        known = name.lower().replace(b"-", b"_").decode("latin-1")
        if known not in _RAY_HEADERS and (known != "x_request_id" or _request_id.fullmatch(value)):
            yield name, value
