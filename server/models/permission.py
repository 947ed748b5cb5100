"""Permission to change the models of this server: download, delete, create and copy."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from server.configuration.settings import is_loopback
from server.http.errors import KEY_REQUIRED, ApiError

# A proxy on this machine has a loopback address, its clients may not.
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


@dataclass(frozen=True, slots=True)
class ModelPermission:
    """Permits clients with an API key; without keys, clients of this machine.

    has_keys  whether the server has keys: then no request without one arrives here
    """

    has_keys: bool

    def check(self, request: Request) -> None:
        """Raise ApiError for a client that may not change the models."""
        if not self.has_keys and not _is_local(request):
            message = "Without API keys, only clients on this machine may change its models; see --api-key."
            raise ApiError(KEY_REQUIRED, message)


def _is_local(request: Request) -> bool:
    forwarded = any(name in request.headers for name in _PROXY_HEADERS)
    return request.client is not None and is_loopback(request.client.host) and not forwarded
