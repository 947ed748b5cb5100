"""The native code that reads blocks of GGUF files stays within its memory, whatever the blocks are."""

from __future__ import annotations

import shutil

import pytest

from tests.faults.sanitizers import fuzz


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_random_blocks_are_read_within_bounds() -> None:
    result = fuzz(2000)

    assert ("", 0) == (result.report, result.wrong)
    assert min(result.sound, result.refused) > 50
