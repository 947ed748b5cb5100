"""The user's cache folder: its place, its size limit, and files left by killed processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels import cache_folder
from engine.kernels.cpu.build import libraries
from engine.kernels.packing import PackedMatrix
from engine.kernels.rounding import pack_floats
from engine.load.check import outcomes
from engine.load.machine import machine
from engine.quantize import store


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache at XDG_CACHE_HOME."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvcellar"


def written(root: Path, name: str, *, size: int, age_seconds: int) -> Path:
    """A file with a size and an age of its last use."""
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(size))
    os.utime(file, (1_700_000_000 - age_seconds,) * 2)
    return file


@pytest.mark.parametrize(("named", "expected"), [("/elsewhere", "/elsewhere"), ("", "{home}"), ("relative", "{home}")])
def test_folder_follows_xdg(named: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute paths only; the default is ~/.cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", named)

    assert Path(expected.format(home=tmp_path / ".cache"), "kvcellar", "x") == cache_folder.cache_folder("x")


def test_kernels_and_weights_share_the_root(root: Path) -> None:
    assert root / "kernels" == libraries._user_cache()
    assert root / "weights" == store.WeightStore("model", 8).file.parent


KINDS = ("kernels", "weights", "checks")


def others_may_write(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Permissions for all users or the group, or another owner."""
    if how == "owner":
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    else:
        folder.chmod(0o777 if how == "all" else 0o770)


@pytest.mark.parametrize("how", ["all", "group", "owner"])
@pytest.mark.parametrize("kind", KINDS)
def test_folders_that_other_users_can_write_to_are_refused(
    kind: str, how: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache_folder.cache_folder(kind)
    with cache_folder.replacing(folder / "file") as scratch:
        scratch.write_text("content")
    assert find_machine_cache_error() is None
    others_may_write(folder, monkeypatch, how)

    with pytest.raises(PermissionError, match="other users can write"):
        cache_folder.cache_folder(kind)
    with pytest.raises(PermissionError, match="other users can write"), cache_folder.replacing(folder / "file"):
        pass
    assert "other users can write" in (find_machine_cache_error() or "")


def find_machine_cache_error() -> str | None:
    """What `cellar doctor` says of the cache."""
    return machine._cache()[2]


def test_planted_files_are_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reader of a cached file works without one."""
    outcome, weights = outcomes.OutcomeFile("model"), store.WeightStore("model", 8)
    monkeypatch.setattr(store, "MIN_BYTES", 0)
    weights.write(layers())
    assert weights.read({"layer": (64, 64)}) is not None
    assert "checks" == outcome.file.parent.name

    for kind in KINDS:
        (root / kind).mkdir(exist_ok=True)
        (root / kind).chmod(0o777)

    assert (None, None) == (weights.read({"layer": (64, 64)}), outcome.read())
    with pytest.raises(libraries.LibraryUnavailable, match="other users can write"):
        libraries._user_cache()


def test_a_umask_for_groups_does_not_open_the_cache(root: Path) -> None:
    """Also a root that an earlier version made so."""
    before = os.umask(0o002)
    try:
        file = cache_folder.cache_folder("x") / "file"
        with cache_folder.replacing(file) as scratch:
            scratch.write_text("content")
    finally:
        os.umask(before)
    assert (0o700, 0o700) == (root.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777)
    root.chmod(0o775)

    assert file.parent == cache_folder.cache_folder("x")
    assert 0o755 == root.stat().st_mode & 0o777


def test_nothing_is_cached_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(store, "MIN_BYTES", 0)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    kept = store.WeightStore("model", 8)

    kept.write(layers())
    assert kept.read({"layer": (64, 64)}) is None
    with pytest.raises(libraries.LibraryUnavailable, match="no home folder"):
        libraries._user_cache()


def test_least_recently_used_files_are_removed_first(root: Path) -> None:
    files = [written(root, f"{kind}/{age}", size=100, age_seconds=age) for age, kind in ((3, "a"), (2, "b"), (1, "a"))]

    cache_folder.trim(max_bytes=250)

    assert [False, True, True] == [file.exists() for file in files]


def test_use_updates_the_time_of_a_file(root: Path) -> None:
    old, new = (written(root, f"a/{age}", size=100, age_seconds=age) for age in (9, 1))
    cache_folder.mark_used(old)

    cache_folder.trim(max_bytes=100)

    assert (True, False) == (old.exists(), new.exists())


def test_file_in_use_is_never_removed(root: Path) -> None:
    """Of this process or of another."""
    own, others, free = (written(root, f"a/{name}", size=100, age_seconds=9) for name in ("own", "others", "free"))
    cache_folder.mark_used(own)
    code = (
        "import sys, pathlib; from engine.kernels.cache_folder import mark_used; mark_used(pathlib.Path(sys.argv[1]));"
        " print(flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(others)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()

    cache_folder.trim(max_bytes=0)
    assert [True, True, False] == [file.exists() for file in (own, others, free)]

    process.communicate(b"\n")
    cache_folder.trim(max_bytes=0)
    assert [True, False] == [file.exists() for file in (own, others)]


def test_weights_are_within_the_size_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MIN_BYTES", 0)
    monkeypatch.setattr(store, "trim", lambda: cache_folder.trim(max_bytes=1))
    old = written(root, "weights/int8-old.safetensors", size=100, age_seconds=9)
    kept = store.WeightStore("model", 8)

    kept.write(layers())

    assert (False, True) == (old.exists(), kept.file.exists())


def layers() -> dict[str, PackedMatrix]:
    """One small quantised layer."""
    import torch

    return {"layer": pack_floats(torch.ones(64, 64), 8)}


# A fake compiler that does not end.
STUCK = """#!/bin/sh
if [ "$1" = --version ]; then echo 1; exit 0; fi
echo half >"$TMPDIR/half.s"
echo $$ >"{pid}"
exec sleep 60
"""


def test_files_of_a_killed_build_are_removed(root: Path, tmp_path: Path) -> None:
    cache, path, pid = root / "kernels", tmp_path / "bin", tmp_path / "pid"
    path.mkdir()
    (path / "g++").write_text(STUCK.format(pid=pid))
    (path / "g++").chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from engine.kernels.cpu.build import libraries;"
        " libraries.library('attention', 'generic', prebuilt=Path('none'), path=sys.argv[1])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        os.sched_yield()
    process.kill()
    process.wait()
    os.kill(int(pid.read_text()), signal.SIGKILL)
    left = list(cache.iterdir())
    assert ["half.s"] == [file.name for folder in left for file in folder.iterdir()]

    finished = "while [ $# -gt 1 ] && [ $1 != -o ]; do shift; done; echo >${2:-/dev/null}"
    (path / "g++").write_text(f"#!/bin/sh\n{finished}\n")
    library = libraries.library("attention", "generic", prebuilt=tmp_path / "none", path=str(path))

    assert [library] == list(cache.iterdir())


def test_scratch_folder_in_use_stays(root: Path) -> None:
    root.mkdir(parents=True)
    with cache_folder.scratch_folder(root) as first, cache_folder.scratch_folder(root) as second:
        assert first.is_dir()
        assert second.is_dir()

    assert [] == list(root.iterdir())
