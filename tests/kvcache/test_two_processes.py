"""Two processes with one folder of the disk cache: every file stays valid, and no text is read wrong."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache.disk import DiskFolder
from kvcache.offload import OffloadConfig
from tests.kvcache.digests import FULL, WINDOW, compute_and_insert, flush_all, make, reused_length

TURNS = 40
# `compute_and_insert` and `reused_length` compare every cell with the digest of its tokens.
PROGRAM = """
import random, sys
from pathlib import Path
from tests.kvcache.test_two_processes import use

use(Path(sys.argv[1]), random.Random(sys.argv[2]), int(sys.argv[3]))
"""


def use(folder: Path, draw: random.Random, disk_bytes: int) -> None:
    """Cache texts with common prefixes, write them, and restart with what is in the folder."""
    for _ in range(4):
        config = OffloadConfig(folder=folder, disk_bytes=disk_bytes, identity="model", report=print)
        cache = make(FULL, WINDOW, state_bytes=10**6, offload=config)
        for _ in range(TURNS // 4):
            start = draw.randrange(4)
            text = tuple(range(100 * start, 100 * start + draw.randrange(5, 40)))
            assert reused_length(cache, text) <= len(text)
            compute_and_insert(cache, text, checkpoint=True)
            flush_all(cache)


@pytest.mark.slow
@pytest.mark.parametrize("disk_bytes", [10**7, 30_000], ids=["large", "full"])
def test_two_processes_share_a_folder(disk_bytes: int, tmp_path: Path) -> None:
    """With a budget that makes both delete files that the other one uses, too."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), name, str(disk_bytes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("a", "b")
    ]
    outputs = [process.communicate(timeout=200)[0] for process in running]

    assert [0, 0] == [process.returncode for process in running], outputs
    assert not any("invalid" in output for output in outputs)
    found = DiskFolder(tmp_path, "model")
    names = [file.name for file in found.scan()]
    assert names
    assert all(found.read(name) for name in names)
    # Each process keeps its own budget.
    assert sum(file.bytes for file in found.scan()) <= 2 * disk_bytes
    assert [] == [*tmp_path.rglob(".*")]
