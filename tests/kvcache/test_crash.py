"""kill -9 at any moment: the next start finds whole files or none, and loads computed cells only."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache import prefix
from kvcache.node import Node
from kvcache.offload import OffloadConfig
from tests.kvcache.digests import FULL, WINDOW, check_references, make, reused_length

ROOT = Path(__file__).resolve().parents[2]
# Forks a child for each input line: a folder and the number of the first text. A child computes texts and writes each
# to disk, until it is killed.
FORK_SERVER = """
import os, sys
from itertools import count
from pathlib import Path
from kvcache import offload
from kvcache.offload import OffloadConfig
from tests.kvcache.digests import FULL, WINDOW, make, compute_and_insert
offload.MAX_ENTRY_BYTES = 600
print("ready", flush=True)
for line in sys.stdin:
    folder, first = line.split()
    child = os.fork()
    if child:
        print(child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)
        continue
    config = OffloadConfig(folder=Path(folder), disk_bytes=10**9, identity="model")
    cache = make(FULL, WINDOW, state_bytes=10**6, offload=config)
    for number in count(int(first)):
        compute_and_insert(cache, [number % 7, number, *range(30)], checkpoint=True)
        cache.flush_to_disk(1)
"""


@pytest.fixture(scope="module")
def fork_server() -> Iterator[subprocess.Popen[str]]:
    """The process that forks the writers."""
    process = subprocess.Popen(
        [sys.executable, "-c", FORK_SERVER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "ready\n" == process.stdout.readline()
    yield process
    process.communicate()
    assert 0 == process.returncode


def kill_one(fork_server: subprocess.Popen[str], folder: Path, first: int, seconds: float) -> None:
    """Let a child write for some seconds, then kill it."""
    assert fork_server.stdin is not None
    assert fork_server.stdout is not None
    fork_server.stdin.write(f"{folder} {first}\n")
    fork_server.stdin.flush()
    child = int(fork_server.stdout.readline())
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert "dead\n" == fork_server.stdout.readline()


def kill_many(times: int, fork_server: subprocess.Popen[str], folder: Path) -> int:
    """Kill children in turn, each over the files of the one before; the number of texts found at the end."""
    draw, found = random.Random(times), 0
    for kill in range(10 * times):
        # On a busy machine all of the first children may die before their first write: later ones have more time.
        if kill >= times and found:
            break
        kill_one(fork_server, folder, 1000 * kill, draw.uniform(0, 0.08) * (1 + kill // times))
        reports: list[str] = []
        config = OffloadConfig(folder=folder, disk_bytes=10**9, identity="model", report=reports.append)
        cache = make(FULL, WINDOW, state_bytes=10**6, offload=config)
        ends = [end for root in cache._tree._radix.roots.values() for end in paths(root, [])]
        for path, whole in ends[-20:]:
            length = reused_length(cache, path)
            assert length == len(path) or not whole
        check_references(cache)
        assert [] == reports
        assert len(ends) >= found
        found = len(ends)
    return found


def paths(node: Node, before: list[int]) -> list[tuple[list[int], bool]]:
    """The tokens of each leaf below a node, and whether the saved text ended there."""
    here = [*before, *node.tokens.tolist()]
    return [end for child in node.children.values() for end in paths(child, here)] or [(here, node.fixed_end)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load short ranges too."""
    monkeypatch.setattr(prefix, "MIN_LOAD_TOKENS", 1)


def test_a_killed_process_leaves_whole_files(fork_server: subprocess.Popen[str], tmp_path: Path) -> None:
    """A dozen kills leave no invalid file and no wrong content."""
    assert 0 < kill_many(12, fork_server, tmp_path)


@pytest.mark.slow
def test_a_killed_process_leaves_whole_files_at_length(fork_server: subprocess.Popen[str], tmp_path: Path) -> None:
    assert 0 < kill_many(200, fork_server, tmp_path)
    assert [] != list(tmp_path.rglob(".*")), "no process was killed during a write"
