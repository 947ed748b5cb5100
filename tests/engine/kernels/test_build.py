"""A library is built once, cached by a digest of its sources and compiler, and never loaded truncated."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import threading
from pathlib import Path

import pytest

from engine.kernels.cpu.build import libraries
from tests.libraries import compiled, every_variant

# A fake g++ that counts its builds.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
echo built >>"{log}"
{work}
while [ "$1" != -o ]; do shift; done
printf 'a library' >"$2"
"""


class Workbench:
    """A folder with a fake compiler on its path, and a cache."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.prebuilt, self.path, self.log = (folder / name for name in ("cache", "prebuilt", "bin", "log"))
        self.path.mkdir()
        self.install()

    def install(self, version: str = "1", work: str = "") -> None:
        """Install the fake compiler."""
        compiler = self.path / "g++"
        compiler.write_text(COMPILER.format(version=version, log=self.log, work=work))
        compiler.chmod(0o755)

    def library(self) -> Path:
        """The requested library."""
        return libraries.library("attention", "generic", prebuilt=self.prebuilt, cache=self.cache, path=str(self.path))

    @property
    def builds(self) -> int:
        """How many times the compiler built a library."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workbench:
    monkeypatch.setattr(libraries, "_failed", set())
    return Workbench(tmp_path)


def test_library_is_built_once(bench: Workbench) -> None:
    assert bench.library() == bench.library()
    assert 1 == bench.builds
    assert bench.library().read_bytes().startswith(b"a library")


def test_another_compiler_version_builds_again(bench: Workbench) -> None:
    first = bench.library()
    bench.install(version="2")

    assert first != bench.library()
    assert 2 == bench.builds


def test_changed_source_builds_again(bench: Workbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = bench.library()
    source = tmp_path / "source"
    (source / "attention").mkdir(parents=True)
    (source / "attention" / "attention.cpp").write_text("int other;")
    monkeypatch.setattr(libraries, "SOURCE", source)

    assert first != bench.library()


@pytest.mark.parametrize("content", [b"", b"a lib", b"a library and forty other bytes that are no digest"])
def test_truncated_or_changed_file_is_built_again(bench: Workbench, content: bytes) -> None:
    whole = bench.library().read_bytes()
    bench.library().write_bytes(content)

    assert whole == bench.library().read_bytes()
    assert 2 == bench.builds


def test_only_the_latest_builds_are_kept(bench: Workbench) -> None:
    """The build in use is always one of them."""
    last = None
    for version in range(9):
        bench.install(version=str(version))
        last = bench.library()

    kept = sorted(bench.cache.glob("*.so"))
    assert 4 == len(kept)
    assert last in kept


def test_missing_compiler_is_the_reason(bench: Workbench) -> None:
    (bench.path / "g++").unlink()

    with pytest.raises(
        libraries.LibraryUnavailable, match=r"no C\+\+ compiler on the PATH \(looked for g\+\+, clang\+\+, c\+\+\)"
    ):
        bench.library()


def test_compiler_error_is_quoted(bench: Workbench) -> None:
    """No file is left."""
    bench.install(work="echo 'no such header: omp.h' >&2; exit 1")

    with pytest.raises(libraries.LibraryUnavailable, match="no such header: omp.h"):
        bench.library()
    assert [] == list(bench.cache.iterdir())


def test_the_next_variant_is_built_when_the_compiler_fails(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that lacks the instructions of the fastest variant; it is not asked again."""
    monkeypatch.setattr(libraries, "supported_variants", lambda: frozenset({"avxvnni", "avx2", "generic"}))
    unknown = 'case "$*" in *-mavxvnni*) echo "unrecognized option -mavxvnni" >&2; exit 1;; esac'
    bench.install(work=unknown)

    first, second = (
        libraries.library("linear", prebuilt=bench.prebuilt, cache=bench.cache, path=str(bench.path)) for _ in range(2)
    )

    assert first == second
    assert first.name.startswith("linear-avx2-")
    assert 2 == bench.builds
    assert ("avx2", "generic") == libraries.variants("linear")


def test_a_compiler_that_builds_no_variant_is_the_reason(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "supported_variants", lambda: frozenset({"avxvnni", "avx2", "generic"}))
    bench.install(work="echo 'no such header: omp.h' >&2; exit 1")

    with pytest.raises(libraries.LibraryUnavailable, match="no such header: omp.h"):
        libraries.library("linear", prebuilt=bench.prebuilt, cache=bench.cache, path=str(bench.path))


def test_a_build_is_limited_in_processor_time(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its wall time is longer on a busy machine. The end of a build is logged."""
    monkeypatch.setattr(libraries, "_LIMITED", tuple(word.replace("300", "1") for word in libraries._LIMITED))
    bench.install(work="sleep 1.2")
    assert bench.library().exists()

    bench.install(version="2", work="while :; do :; done")
    with pytest.raises(libraries.LibraryUnavailable, match=r"g\+\+ failed"):
        bench.library()
    assert "the attention kernel is not compiled" in caplog.text


def test_prebuilt_library_comes_first(bench: Workbench) -> None:
    built = bench.library()
    bench.prebuilt.mkdir()
    ready = bench.prebuilt / libraries._name("attention", "generic", "prebuilt", ())
    ready.write_bytes(built.read_bytes())
    (bench.path / "g++").unlink()

    assert ready == bench.library()


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_cache_writable_by_other_users_is_refused(bench: Workbench) -> None:
    bench.cache.mkdir()
    bench.cache.chmod(0o777)

    with pytest.raises(libraries.LibraryUnavailable, match="other users can write"):
        bench.library()


def test_cache_that_cannot_be_created_is_the_reason(bench: Workbench) -> None:
    bench.cache.write_text("a file")

    with pytest.raises(libraries.LibraryUnavailable, match="no folder for the library"):
        bench.library()


def test_two_kernels_are_compiled_at_a_time(bench: Workbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cold start: each of two builds ends only after the other has begun, and all three kernels are there."""
    # A build counts itself, then waits until two have begun.
    bench.install(work=f'for _ in $(seq 500); do [ $(wc -l <"{bench.log}") -ge 2 ] && break; sleep 0.01; done')
    monkeypatch.setenv("CXX", str(bench.path / "g++"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(libraries, "PREBUILT", bench.prebuilt)
    monkeypatch.setattr(libraries, "variants", lambda kernel: ("avx2",))
    libraries.compile_ahead()
    files = [libraries.library(kernel) for kernel in libraries.KERNELS]

    assert 3 == bench.builds
    assert all(file.read_bytes().startswith(b"a library") for file in files)


def test_concurrent_callers_wait_for_one_build(bench: Workbench) -> None:
    bench.install(work="sleep 0.2")
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(bench.library().read_bytes())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [bench.library().read_bytes()] * 3 == found
    assert 1 == bench.builds
    assert [bench.library()] == list(bench.cache.iterdir())


FUNCTIONS = {"attention": "cellar_attend", "linear": "cellar_multiply", "step": "cellar_step"}


@pytest.mark.parametrize(
    ("kernel", "variant"),
    [pytest.param(kernel, *one.values, marks=one.marks) for kernel in FUNCTIONS for one in every_variant(kernel)],
)
def test_sources_compile(kernel: str, variant: str) -> None:
    """With the system's compiler, for all variants of this machine."""
    if not any(shutil.which(name) for name in libraries.COMPILERS):
        pytest.skip("there is none")

    assert hasattr(ctypes.CDLL(str(compiled(kernel, variant))), FUNCTIONS[kernel])


VARIANTS = {
    "x86_64": {
        "attention": ("bfloat16", "avx512", "avx2", "generic"),
        "linear": ("vnni", "avxvnni", "avx2", "generic"),
        "step": ("amx", "bfloat16", "vnni", "avx2"),
    },
    "aarch64": {"attention": ("neon",), "linear": ("i8mm", "dotprod", "neon"), "step": ("neon",)},
    "arm64": {"attention": ("neon",), "linear": ("i8mm", "dotprod", "neon"), "step": ("neon",)},
    "riscv64": {"attention": ("generic",), "linear": ("generic",), "step": ()},
}


@pytest.mark.parametrize("machine", VARIANTS)
def test_all_variants_of_an_architecture_can_be_prebuilt(
    machine: str, bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{bench.path}:{os.environ['PATH']}")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(platform, "machine", lambda: machine)

    built = libraries.prebuild(bench.prebuilt)

    assert sorted(built) == sorted(bench.prebuilt.iterdir())
    assert sorted(names(machine)) == sorted(file.name.rpartition("-")[0] for file in built)
    assert len(built) == bench.builds
    for kernel, variants in VARIANTS[machine].items():
        for variant in variants:
            assert libraries.library(kernel, variant, prebuilt=bench.prebuilt, path="none") in built


def names(machine: str) -> list[str]:
    """The names of all libraries of an architecture, without digests."""
    return [f"{kernel}-{variant}-{machine}" for kernel, own in VARIANTS[machine].items() for variant in own]


@pytest.mark.parametrize("machine", ["aarch64", "riscv64"])
def test_other_architectures_get_no_x86_flags(machine: str, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.install(work='case "$*" in *-mavx*|*-mfma*) echo "unrecognized command-line option" >&2; exit 1;; esac')
    monkeypatch.setenv("CXX", str(bench.path / "g++"))

    assert len(names(machine)) == len(libraries.prebuild(bench.prebuilt, machine))


def test_another_architecture_is_built_by_a_cross_compiler(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the name of Debian's packages, or the one that CXX gives, with arguments."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", f"{bench.path}:{os.environ['PATH']}")
    (bench.path / "g++").rename(bench.path / "aarch64-linux-gnu-g++")

    assert len(names("aarch64")) == len(libraries.prebuild(bench.prebuilt, "aarch64"))

    (bench.path / "aarch64-linux-gnu-g++").rename(bench.path / "cross")
    monkeypatch.setenv("CXX", f"{bench.path / 'cross'} --sysroot=/")
    assert len(names("aarch64")) == len(libraries.prebuild(bench.prebuilt, "aarch64"))

    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(bench.path))
    with pytest.raises(libraries.LibraryUnavailable, match=r"looked for aarch64-linux-gnu-g\+\+\) for aarch64; \$CXX"):
        libraries.prebuild(bench.prebuilt, "aarch64")
