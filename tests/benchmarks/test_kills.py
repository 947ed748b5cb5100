"""Three real replicas behind `cellar route`: one is killed under 24 streams, all are replaced, one leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.fleet.kills import STREAMS, fleet, run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_streams_survive_their_replica(tmp_path: Path) -> None:
    """Texts, log-probabilities and usage equal those of a replica alone."""
    with fleet(tmp_path) as (replicas, url):
        kill, restart, scale_down = asyncio.run(run(replicas, url, 1, print))

    assert {"ok": STREAMS} == kill["streams"]
    assert STREAMS == kill["equal"]
    assert kill["resumed"] > 0
    assert {"ok": restart["equal"]} == restart["streams"]
    assert {"ok": scale_down["equal"]} == scale_down["streams"]
    assert scale_down["exit code"] == 0
