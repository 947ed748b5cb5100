"""Leases of a model: it counts as used until each of them is released, also by an error or a disconnect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

Leased = TypeVar("Leased")

# The leases of the current request.
_leases: ContextVar[ExitStack] = ContextVar("leases")


class LeaseCount:
    """How many leases of a model are held."""

    def __init__(self) -> None:
        self.held = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """One more lease inside the block."""
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1


class LeaseMiddleware:
    """ASGI middleware: releases what a request leased when its response has ended, in whatever way."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        with ExitStack() as leases:
            token = _leases.set(leases)
            try:
                await self.app(scope, receive, send)
            finally:
                _leases.reset(token)


def hold_for_request(lease: AbstractContextManager[Leased]) -> Leased:
    """What a lease is of, until the current request has ended. LookupError outside a request."""
    return _leases.get().enter_context(lease)
