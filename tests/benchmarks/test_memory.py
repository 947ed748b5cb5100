"""benchmarks/memory.py: the printed memory plan and the peak memory of a process."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from benchmarks.memory import MemoryPlan, main, peak_resident


def test_the_plan_is_parsed_from_the_banner() -> None:
    """All parts, in any unit; a ValueError without a plan."""
    cache = "cache 3.5 GiB (32768 tokens x 112.0 KiB)"
    line = f"  memory    weights 900.5 MiB + {cache} + work 322.5 MiB = 4.7 GiB of 22.7 GiB free"

    plan = MemoryPlan(weights=int(900.5 * 2**20), cache=int(3.5 * 2**30), work=int(322.5 * 2**20))

    assert plan == MemoryPlan.printed(line)
    with pytest.raises(ValueError, match="no memory plan"):
        MemoryPlan.printed("memory is plentiful")


def test_a_short_peak_counts() -> None:
    """The peak, not the last value."""

    async def grow() -> None:
        held = bytearray(2**27)
        held[:: 2**12] = b"x" * (2**27 // 2**12)
        await asyncio.sleep(0.2)

    async def measured() -> int:
        return await peak_resident(asyncio.create_task(grow()), psutil.Process())

    before = psutil.Process().memory_info().rss

    assert asyncio.run(measured()) > before + 2**26


@pytest.mark.slow
def test_a_full_server_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled model is smaller than the interpreter, so the goal is missed."""
    assert 1 == main(["--slots", "2", "--context", "64"])
    assert "times weights and cache" in capsys.readouterr().out
