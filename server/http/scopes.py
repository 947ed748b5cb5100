"""The scopes of API keys: which requests change the server, and need a key with the scope `admin`."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import Scope

from server.http.errors import SCOPE_REQUIRED, ApiError

# Methods and paths as of routes. Also those that are always refused: a later version may serve them.
ADMIN_ROUTES = frozenset(
    {
        ("POST", "/api/pull"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/push"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/lora-adapters"),
        ("POST", "/models/load"),
        ("POST", "/models/unload"),
    }
)
_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def is_use(scope: Scope) -> bool:
    """Whether the request is neither a reading nor a change of the server."""
    method = scope.get("method", "WEBSOCKET")
    return method not in _READING_METHODS and (method, scope["path"]) not in ADMIN_ROUTES


def is_limited(scope: Scope) -> bool:
    """Whether the limits of a key may refuse the request: one for `use` that does not end a running one."""
    ends = scope.get("method") == "DELETE" or scope["path"].rstrip("/").endswith("/cancel")
    return is_use(scope) and not ends


def check_scopes(scope: Scope, scopes: Collection[str]) -> None:
    """Raise ApiError if a key with these scopes may not send the request. Any key may read."""
    if scope.get("method") in _READING_METHODS:
        return
    required = "use" if is_use(scope) else "admin"
    if required not in scopes:
        raise ApiError(SCOPE_REQUIRED, f"This request needs an API key with the scope '{required}'.")
