"""A server with known answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.peer import Peer, running_peer


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A running server of its own for each test."""
    with running_peer() as peer:
        yield peer
