"""Processors and memory that this process may use, by its affinity and its control groups; how its threads wait.

Both versions of control groups (v1 and v2) are read, for the process's own group and its ancestors: the tightest limit
counts.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

FILESYSTEM_ROOT = Path("/")

# Rounds that a waiting OpenMP thread spins before it sleeps. A step with two threads on busy cores (measured): 451 ms
# with libgomp's default of 300,000 rounds, 67 ms with 20,000, 13 ms with 2,000, 8 ms with 0 or 200.
_SPIN_COUNT = "1000"


def processor_count(root: Path = FILESYSTEM_ROOT) -> int:
    """Processors that this process may keep busy, at least 1; a fractional quota is rounded down."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in _groups("cpu", root) if (quota := _processor_quota(group)) is not None]
    return max(1, int(min([allowed, *quotas])))


def free_memory_bytes(root: Path = FILESYSTEM_ROOT) -> int | None:
    """Bytes until the tightest limit of a group, not counting reclaimable file pages; None: there is no limit."""
    left = [free for group in _groups("memory", root) if (free := _free_memory_bytes(group)) is not None]
    return max(0, min(left)) if left else None


def memory_limit_bytes(root: Path = FILESYSTEM_ROOT) -> int | None:
    """The tightest limit of a group; None: there is no limit."""
    limits = [limit for group in _groups("memory", root) for limit, _ in _memory_files(group)]
    return min(limits, default=None)


def limit_spinning() -> None:
    """Limit the spinning of waiting OpenMP threads, unless the user has set it. Call before the import of torch.

    On a busy machine a spinning thread takes the processor from the thread that it waits for.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT


def release_freed_memory() -> None:
    """Return freed memory to the system, where the C library has a function for it (glibc).

    Each thread that reads weights leaves tens of megabytes that are free but resident, 290 MiB in all (measured).
    """
    if os.name == "posix" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the groups that limit this process, from its own group up to the root of each hierarchy."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # A hierarchy of version 2 names no controllers; next to one of version 1 it is mounted elsewhere.
        for mount in (controller,) if controllers else ("", "unified"):
            mounted = root / "sys/fs/cgroup" / mount
            inside = Path(path.lstrip("/"))
            yield from (mounted / group for group in (inside, *inside.parents) if ".." not in group.parts)


def _processor_quota(group: Path) -> float | None:
    text = _text(group / "cpu.max") or ""
    if not text:
        text = f"{_text(group / 'cpu.cfs_quota_us') or ''} {_text(group / 'cpu.cfs_period_us') or ''}"
    quota, period = (_number(part) for part in (*text.split(), "", "")[:2])
    return quota / period if quota and period else None


def _free_memory_bytes(group: Path) -> int | None:
    for limit, used in _memory_files(group):
        return limit - used + _reclaimable_bytes(_text(group / "memory.stat") or "")
    return None


def _memory_files(group: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of a group in bytes, if it has a limit."""
    for limit_file, used_file in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
        limit = _number(_text(group / f"memory.{limit_file}") or "")
        used = _number(_text(group / f"memory.{used_file}") or "")
        if limit is not None and used is not None:
            yield limit, used


def _reclaimable_bytes(statistics: str) -> int:
    """Bytes of inactive file pages; version 1 reports the sum over nested groups as total_inactive_file."""
    counts = dict(line.split(maxsplit=1) for line in statistics.splitlines() if " " in line)
    return _number(counts.get("total_inactive_file", counts.get("inactive_file", ""))) or 0


def _number(text: str) -> int | None:
    """A count; None for "max", "-1" and missing values."""
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None
