"""Processor affinity and the limits of control groups, in both versions of their files."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from engine.config import ConfigError, EngineConfig, parse_memory
from engine.load.machine import available_memory
from engine.load.machine.resources import free_memory_bytes, memory_limit_bytes, processor_count

NO_LIMIT = "9223372036854771712"


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 processors with an affinity to 16."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def system(root: Path, files: dict[str, str]) -> Path:
    """A file system root with the given files."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, 16),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "6400000 100000"}, 16),
        # A quota of a parent group counts too.
        (
            {
                "proc/self/cgroup": "0::/system.slice/cellar.service",
                "sys/fs/cgroup/system.slice/cpu.max": "300000 100000",
                "sys/fs/cgroup/system.slice/cellar.service/cpu.max": "500000 100000",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "5:cpuset:/\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            16,
        ),
        # Both versions at once: the second is mounted beside the first.
        (
            {
                "proc/self/cgroup": "2:memory:/a\n0::/b",
                "sys/fs/cgroup/unified/b/cpu.max": "600000 100000",
                "sys/fs/cgroup/memory/cpu.max": "100000 100000",
            },
            6,
        ),
        ({"proc/self/cgroup": "0::/../..", "sys/fs/cgroup/cpu.max": "500000 100000"}, 5),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": ""}, 16),
    ],
)
@pytest.mark.usefixtures("sixteen")
def test_processor_count_follows_affinity_and_quotas(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert expected == processor_count(system(tmp_path, files))


@pytest.mark.usefixtures("sixteen")
def test_processor_count_without_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity")

    assert 64 == processor_count(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "100"}, None),
        ({"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "300"}, 700),
        ({"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "1300"}, 0),
        (
            {
                "sys/fs/cgroup/memory.max": "1000",
                "sys/fs/cgroup/memory.current": "900",
                "sys/fs/cgroup/memory.stat": "anon 100\ninactive_file 500\nactive_file 300",
            },
            600,
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "800",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 50\ntotal_inactive_file 100",
            },
            300,
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "800",
                "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "5000",
                "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": "800",
            },
            4200,
        ),
    ],
)
def test_free_memory_follows_the_limits_of_containers(
    files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    """Inactive file pages are reclaimable."""
    groups = "3:memory:/docker/abc\n0::/"

    assert expected == free_memory_bytes(system(tmp_path, {"proc/self/cgroup": groups, **files}))


def test_available_bytes_are_within_the_container_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available_memory, "free_memory_bytes", lambda: 12345)
    assert 12345 == available_memory.available_bytes()

    monkeypatch.setattr(available_memory, "free_memory_bytes", lambda: None)
    assert 12345 < available_memory.available_bytes()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "100"}, None),
        ({"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "300"}, 1000),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "800",
                "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "5000",
                "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": "800",
            },
            5000,
        ),
    ],
)
def test_the_tightest_memory_limit_counts(files: dict[str, str], expected: int | None, tmp_path: Path) -> None:
    """In both versions of control groups."""
    groups = "3:memory:/docker/abc\n0::/"

    assert expected == memory_limit_bytes(system(tmp_path, {"proc/self/cgroup": groups, **files}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8g", 8 * 2**30),
        ("8Gi", 8 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("8GB", 8_000_000_000),
        ("512m", 2**29),
        ("12345678", 12345678),
        ("40%", 400),
        (" 12.5 % ", 125),
    ],
)
def test_memory_is_a_size_or_a_share(text: str, expected: int) -> None:
    """A share is one of the total, here 1000 bytes."""
    assert expected == parse_memory(text)(1000)


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "8x", "-1g", "1e9", "half"])
def test_other_memory_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="^memory must be a size such as 8GiB or a share"):
        EngineConfig(memory=text)


@pytest.mark.parametrize("text", ["5", "1", "4096"])
def test_a_size_that_lacks_its_unit_is_refused(text: str) -> None:
    """`--memory 5` is no limit of five bytes."""
    with pytest.raises(ConfigError, match=f"^memory needs a unit: .* write {text}GiB"):
        EngineConfig(memory=text)


def test_available_bytes_are_within_the_memory_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process has already counts, and so does its host cache."""
    monkeypatch.setattr(available_memory, "free_memory_bytes", lambda: None)
    monkeypatch.setattr(available_memory, "memory_limit_bytes", lambda: None)
    used = psutil.Process().memory_info().rss
    total = psutil.virtual_memory().total

    free = available_memory.available_bytes(EngineConfig(memory=f"{used + 2**26}"))
    assert 0 <= free <= 2**26
    assert max(0, free - 2**25) == pytest.approx(
        available_memory.available_bytes(EngineConfig(memory=f"{used + 2**26}", host_cache_bytes=2**25)), abs=2**22
    )
    assert available_memory.available_bytes(EngineConfig(memory="10%")) <= total // 10
    assert 0 == available_memory.available_bytes(EngineConfig(memory="1MiB"))


def test_a_share_is_one_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    used = psutil.Process().memory_info().rss
    monkeypatch.setattr(available_memory, "free_memory_bytes", lambda: 2**40)
    monkeypatch.setattr(available_memory, "memory_limit_bytes", lambda: 2 * used)

    assert available_memory.available_bytes(EngineConfig(memory="60%")) <= used // 5
