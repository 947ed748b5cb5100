"""A library is built once, kept under a name that changes with its source, and never loaded in part."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import threading
from pathlib import Path

import pytest

from engine.kernels.cpu import build

# Stands for g++: counts its builds, and needs no time.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
echo built >>"{log}"
{work}
while [ "$1" != -o ]; do shift; done
printf 'a library' >"$2"
"""


class Bench:
    """A folder with a compiler of ours on its path, and a cache."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.prebuilt, self.path, self.log = (folder / name for name in ("cache", "prebuilt", "bin", "log"))
        self.path.mkdir()
        self.install()

    def install(self, version: str = "1", work: str = "") -> None:
        """Put the compiler there."""
        compiler = self.path / "g++"
        compiler.write_text(COMPILER.format(version=version, log=self.log, work=work))
        compiler.chmod(0o755)

    def library(self) -> Path:
        """What is asked for."""
        return build.library("attention", "generic", prebuilt=self.prebuilt, cache=self.cache, path=str(self.path))

    @property
    def builds(self) -> int:
        """How often the compiler was at work."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A fresh one."""
    return Bench(tmp_path)


def test_a_library_is_built_once(bench: Bench) -> None:
    """The second process finds what the first has built."""
    assert bench.library() == bench.library()
    assert 1 == bench.builds
    assert bench.library().read_bytes().startswith(b"a library")


def test_another_compiler_builds_anew(bench: Bench) -> None:
    """The name holds the compiler's version, so an upgrade does not run old code."""
    first = bench.library()
    bench.install(version="2")

    assert first != bench.library()
    assert 2 == bench.builds


def test_a_changed_source_builds_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The name holds the sources."""
    first = bench.library()
    source = tmp_path / "source"
    source.mkdir()
    (source / "attention.cpp").write_text("int other;")
    monkeypatch.setattr(build, "SOURCE", source)

    assert first != bench.library()


@pytest.mark.parametrize("content", [b"", b"a lib", b"a library and forty other bytes that are no digest"])
def test_a_spoilt_file_is_built_anew(bench: Bench, content: bytes) -> None:
    """A cached file that was cut short or changed is not what the digest at its end says."""
    whole = bench.library().read_bytes()
    bench.library().write_bytes(content)

    assert whole == bench.library().read_bytes()
    assert 2 == bench.builds


def test_only_the_last_builds_are_kept(bench: Bench) -> None:
    """Compilers and versions come and go: what they built does not pile up, and the one in use is always there."""
    last = None
    for version in range(9):
        bench.install(version=str(version))
        last = bench.library()

    kept = sorted(bench.cache.glob("*.so"))
    assert 4 == len(kept)
    assert last in kept


def test_without_a_compiler_the_reason_says_so(bench: Bench) -> None:
    """Nothing is built, and people learn what to install."""
    (bench.path / "g++").unlink()

    with pytest.raises(
        build.LibraryUnavailable, match=r"no C\+\+ compiler on the PATH \(looked for g\+\+, clang\+\+, c\+\+\)"
    ):
        bench.library()


def test_a_compiler_that_fails_is_quoted(bench: Bench) -> None:
    """Its last words are the reason, and nothing is left behind."""
    bench.install(work="echo 'no such header: omp.h' >&2; exit 1")

    with pytest.raises(build.LibraryUnavailable, match="no such header: omp.h"):
        bench.library()
    assert [] == list(bench.cache.iterdir())


def test_a_wheels_library_comes_first(bench: Bench) -> None:
    """What the wheel carries is used as it is, without a compiler."""
    built = bench.library()
    bench.prebuilt.mkdir()
    ready = bench.prebuilt / build._name("attention", "generic", "prebuilt", ())
    ready.write_bytes(built.read_bytes())
    (bench.path / "g++").unlink()

    assert ready == bench.library()


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_a_cache_that_others_write_is_refused(bench: Bench) -> None:
    """What lies there is run."""
    bench.cache.mkdir()
    bench.cache.chmod(0o777)

    with pytest.raises(build.LibraryUnavailable, match="other users can write"):
        bench.library()


def test_a_cache_that_cannot_be_made_is_a_reason(bench: Bench) -> None:
    """A read-only or strange home is no crash."""
    bench.cache.write_text("a file")

    with pytest.raises(build.LibraryUnavailable, match="no folder for the library"):
        bench.library()


def test_several_may_build_at_once(bench: Bench) -> None:
    """Whoever comes while a build runs makes its own; each ends with a whole library, and only that stays."""
    bench.install(work="sleep 0.2")
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(bench.library().read_bytes())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [bench.library().read_bytes()] * 3 == found
    assert [bench.library()] == list(bench.cache.iterdir())


@pytest.mark.parametrize(("kernel", "function"), [("attention", "cellar_attend"), ("linear", "cellar_multiply")])
def test_the_real_source_compiles(kernel: str, function: str) -> None:
    """With the system's compiler, if there is one, for every instruction set of this machine."""
    if not any(shutil.which(name) for name in build.COMPILERS):
        pytest.skip("there is none")

    for variant in build.variants(kernel):
        assert hasattr(ctypes.CDLL(str(build.library(kernel, variant))), function)


def test_every_variant_can_be_prebuilt(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel's folder holds one library a kernel and variant, under the names that are looked for."""
    monkeypatch.setenv("PATH", f"{bench.path}:{os.environ['PATH']}")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    made = build.prebuild(bench.prebuilt)

    assert sorted(made) == sorted(bench.prebuilt.iterdir())
    assert bench.library() in made
    assert sum(len(variants) for variants in build.KERNELS.values()) == bench.builds


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "ppc64le", "riscv64"])
def test_no_flag_of_x86_is_given_to_another_compiler(
    machine: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler for another architecture refuses -mavx2, and with it the whole image."""
    bench.install(work='case "$*" in *-mavx*|*-mfma*) echo "unrecognized command-line option" >&2; exit 1;; esac')
    monkeypatch.setenv("PATH", f"{bench.path}:{os.environ['PATH']}")
    monkeypatch.setattr(platform, "machine", lambda: machine)

    made = build.prebuild(bench.prebuilt)

    assert [f"attention-generic-{machine}", f"linear-generic-{machine}"] == sorted(
        file.name.rpartition("-")[0] for file in made
    )
    assert bench.library() in made


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["attention", "linear"])
def test_the_real_source_compiles_for_arm(kernel: str, tmp_path: Path) -> None:
    """With Debian's cross compiler (g++-aarch64-linux-gnu), if it is there."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("there is no cross compiler")

    build._build(compiler, kernel, "generic", tmp_path / "library.so")

    # e_machine of the ELF header: 183 is AArch64.
    assert 183 == int.from_bytes((tmp_path / "library.so").read_bytes()[18:20], "little")
