"""Finds the library of a kernel for one instruction set: prebuilt in the wheel, or built once by the system's compiler.

torch is imported only to find the variants of this processor: builds of wheels do without it.

The name of a cached file has a digest of its sources, compiler and flags, and the file ends with a digest of its
content: a truncated file is built again, never loaded. A library is built in a scratch folder and renamed atomically,
so several processes may build at once. Without a compiler there is no library, and the callers fall back to torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from engine.kernels.cache_folder import cache_folder, make_private, mark_used, replace_file, scratch_folder, trim
from engine.kernels.cpu.build.processor import supported_variants, variants_of
from engine.types.progress import report_progress

log = logging.getLogger("cellar.engine")

SOURCE = Path(__file__).parents[1]
PREBUILT = SOURCE / "prebuilt"
COMPILERS = ("g++", "clang++", "c++")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", *_AVX2)
_BFLOAT16 = (*_AVX512, "-mavx512vnni", "-mavx512bf16")
# GCC moves loads of NEON far ahead and runs out of registers: a third more instructions in inner loops.
_NEON = ("-fno-schedule-insns",)
_DOTPROD = (*_NEON, "-march=armv8.2-a+dotprod")
_I8MM = (*_NEON, "-march=armv8.2-a+dotprod+i8mm")
# Kernels by the names of their source files: compiler flags of their variants, fastest first.
KERNELS: dict[str, dict[str, tuple[str, ...]]] = {
    "attention": {"bfloat16": _BFLOAT16, "avx512": _AVX512, "avx2": _AVX2, "neon": _NEON, "generic": ()},
    "linear": {
        "vnni": (*_AVX512, "-mavx512vnni"),
        "avxvnni": (*_AVX2, "-mavxvnni"),
        "avx2": _AVX2,
        "i8mm": _I8MM,
        "dotprod": _DOTPROD,
        "neon": _NEON,
        "generic": (),
    },
    "step": {
        "amx": (*_BFLOAT16, "-mamx-tile", "-mamx-bf16"),
        "bfloat16": _BFLOAT16,
        "vnni": (*_AVX512, "-mavx512vnni"),
        "avx2": _AVX2,
        "neon": _NEON,
    },
}
_FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared"),
    *("-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
)
# Processor time of a build: on a busy machine the wall time is several times as long. A build that waits ends as well.
_BUILD_SECONDS, _WALL_SECONDS = 300, 3600
_LIMITED = ("sh", "-c", f'ulimit -t {_BUILD_SECONDS}; exec "$@"', "sh")
# Builds of one variant in the cache: several versions may be in use.
_KEPT_BUILDS = 4
_DIGEST_BYTES = 32
# Compiled ahead at the same time: the step takes about as long as the other two.
_AHEAD = (("step",), ("attention", "linear"))
# One build of a library in this process; other processes may build it too.
_building: dict[Path, threading.Lock] = {}
# Kernels and variants that the compiler failed on.
_failed: set[tuple[str, str]] = set()


class LibraryUnavailable(Exception):
    """A kernel has no library on this machine, for a human-readable `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BuildFailed(LibraryUnavailable):
    """The compiler failed on a variant, of which it may lack the instructions."""


def variants(kernel: str) -> tuple[str, ...]:
    """The variants of a kernel that this processor can run, fastest first.

    Without those that the compiler of this process failed on, if a variant with vectors is left.
    """
    supported = supported_variants()
    every = tuple(variant for variant in KERNELS[kernel] if variant in supported)
    left = tuple(variant for variant in every if (kernel, variant) not in _failed)
    return left if {*left} - {"generic"} else every


def buildable(kernel: str, machine: str) -> tuple[str, ...]:
    """The variants that a compiler for an architecture can build, fastest first; none for some kernels."""
    return tuple(variant for variant in KERNELS[kernel] if variant in variants_of(machine))


def library(
    kernel: str,
    variant: str | None = None,
    *,
    prebuilt: Path | None = None,
    cache: Path | None = None,
    path: str | None = None,
    flags: tuple[str, ...] = (),
) -> Path:
    """The library file of a kernel's variant, by default the fastest that the compiler builds.

    Raises LibraryUnavailable, and BuildFailed, after which `variants` are fewer.

    prebuilt  folder of libraries that were built before, by default that of the wheel or image
    cache     folder for built libraries, by default in the user's cache; refused if other users can write to it
    path      to look for compilers, by default PATH, unless $CXX is one
    flags     further flags of the compiler, for a library that is compiled
    """
    if variant is None:
        return _fastest_library(kernel, prebuilt=prebuilt, cache=cache, path=path, flags=flags)
    ready = (prebuilt or PREBUILT) / _name(kernel, variant, "prebuilt", ())
    if _is_sound(ready):
        return ready
    compiler, flags = _compiler(path), (*KERNELS[kernel][variant], *flags)
    target = _private_folder(cache or _user_cache()) / _name(kernel, variant, _version(compiler), flags)
    mark_used(target)
    if not _is_sound(target):
        report_progress(f"compile the {kernel} kernel")
        with _building.setdefault(target, threading.Lock()):
            if not _is_sound(target):
                _compile(compiler, kernel, variant, flags, target)
    return target


def _fastest_library(kernel: str, **options: Any) -> Path:
    """The library of the fastest variant that the compiler builds. Raises LibraryUnavailable."""
    while True:
        before = variants(kernel)
        try:
            return library(kernel, before[0], **options)
        except BuildFailed:
            if len(variants(kernel)) >= len(before):
                raise


def compile_ahead() -> None:
    """Compile the fastest libraries in threads where the cache lacks them, two at a time; `library` waits for them."""
    for kernels in _AHEAD:
        threading.Thread(target=_compile_all, args=(kernels,), name=f"compile {kernels[0]}", daemon=True).start()


def _compile_all(kernels: tuple[str, ...]) -> None:
    for kernel in kernels:
        # The caller that needs the library gets the reason.
        with suppress(LibraryUnavailable):
            if variants(kernel)[:1] not in ((), ("generic",)):
                library(kernel)


def _compile(compiler: list[str], kernel: str, variant: str, flags: tuple[str, ...], target: Path) -> None:
    """Compile a library into the cache. Raises LibraryUnavailable."""
    log.info("%s compiles the %s kernel for %s, once on this machine", Path(compiler[0]).name, kernel, variant)
    started = time.monotonic()
    try:
        _build(compiler, kernel, flags, target)
    except LibraryUnavailable as error:
        log.warning("the %s kernel is not compiled for %s: %s", kernel, variant, error.reason)
        if isinstance(error, BuildFailed):
            _failed.add((kernel, variant))
        raise
    log.info("compiled the %s kernel in %.0f s", kernel, time.monotonic() - started)
    mark_used(target)
    _prune(target.parent, f"{kernel}-{variant}-*.so")
    trim()


def find_compiler() -> str | None:
    """The command of the C++ compiler; None: none is on the PATH."""
    try:
        return shlex.join(_compiler(None))
    except LibraryUnavailable:
        return None


def find_library(kernel: str, variant: str, *, prebuilt: Path = PREBUILT) -> Literal["prebuilt", "compiled"] | None:
    """The origin of the library that `library` returns; None: it has to be built first. Builds nothing."""
    if _is_sound(prebuilt / _name(kernel, variant, "prebuilt", ())):
        return "prebuilt"
    try:
        name = _name(kernel, variant, _version(_compiler(None)), KERNELS[kernel][variant])
        return "compiled" if _is_sound(_user_cache() / name) else None
    except LibraryUnavailable:
        return None


def prebuilt_names(machine: str) -> dict[str, tuple[str, str]]:
    """The file names of all prebuilt libraries of an architecture, each with its kernel and variant."""
    every = [(kernel, variant) for kernel in KERNELS for variant in buildable(kernel, machine)]
    return {_name(kernel, variant, "prebuilt", (), machine): (kernel, variant) for kernel, variant in every}


def prebuild(folder: Path, machine: str | None = None) -> list[Path]:
    """Build all variants of all kernels, by the names that `library` looks for, by default for this architecture.

    Sound files of an earlier build are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    machine = machine or platform.machine()
    compiler, names = _compiler(None, machine), prebuilt_names(machine)
    for number, (name, (kernel, variant)) in enumerate(names.items(), 1):
        if not _is_sound(folder / name):
            log.info("kernel %d of %d: %s for %s", number, len(names), kernel, variant)
            _build(compiler, kernel, KERNELS[kernel][variant], folder / name)
    return [folder / name for name in names]


def _name(kernel: str, variant: str, builder: str, flags: tuple[str, ...], machine: str | None = None) -> str:
    """A file name with a digest of the sources, compiler and flags."""
    key = hashlib.sha256()
    for source in _sources():
        key.update(source.read_bytes())
    key.update("\0".join((builder, *_FLAGS, *flags)).encode())
    return f"{kernel}-{variant}-{machine or platform.machine()}-{key.hexdigest()[:16]}.so"


def _sources() -> list[Path]:
    return sorted((*SOURCE.glob("*/*.cpp"), *SOURCE.glob("*/*.h")))


def _compiler(path: str | None, machine: str | None = None) -> list[str]:
    """The command of a compiler for an architecture, by default this one: $CXX unless a path is given, or found."""
    chosen = shlex.split(os.environ.get("CXX", "")) if path is None else []
    if chosen:
        return chosen
    is_native = machine in (None, platform.machine())
    names = COMPILERS if is_native else (f"{machine}-linux-gnu-g++",)
    for name in names:
        compiler = shutil.which(name, path=path)
        if compiler is not None:
            return [compiler]
    reason = f"no C++ compiler on the PATH (looked for {', '.join(names)})"
    raise LibraryUnavailable(reason if is_native else f"{reason} for {machine}; $CXX may name another")


def _version(compiler: list[str]) -> str:
    """The command and version of a compiler."""
    return shlex.join(compiler) + _run([*compiler, "--version"])


def _build(compiler: list[str], kernel: str, flags: tuple[str, ...], target: Path) -> None:
    with scratch_folder(target.parent) as folder:
        product = folder / "library.so"
        (source,) = map(str, SOURCE.glob(f"*/{kernel}.cpp"))
        _run([*compiler, *_FLAGS, *flags, f"-I{SOURCE}", source, "-o", str(product), "-lm"], scratch=folder)
        content = product.read_bytes()
        product.write_bytes(content + hashlib.sha256(content).digest())
        replace_file(product, target)


def _prune(cache: Path, pattern: str) -> None:
    """Remove all but the most recently used builds of one variant."""
    builds = []
    for file in cache.glob(pattern):
        # Another process may remove the file at the same time.
        with suppress(FileNotFoundError):
            builds.append((file.stat().st_mtime_ns, file))
    for _, file in sorted(builds)[:-_KEPT_BUILDS]:
        file.unlink(missing_ok=True)


def _run(command: list[str], scratch: Path | None = None) -> str:
    """The output of a compiler, with its temporary files in `scratch`. Raises LibraryUnavailable with its errors."""
    name = Path(command[0]).name
    environment = None if scratch is None else {**os.environ, "TMPDIR": str(scratch)}
    try:
        done = subprocess.run(
            [*_LIMITED, *command], capture_output=True, text=True, timeout=_WALL_SECONDS, check=True, env=environment
        )
    except subprocess.CalledProcessError as error:
        raise BuildFailed(f"{name} failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LibraryUnavailable(f"{name} does not run: {error}") from error
    return done.stdout


def _is_sound(file: Path) -> bool:
    """Whether a library exists and ends with its own digest: loading a truncated one could crash the process."""
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _user_cache() -> Path:
    if os.name != "posix":
        raise LibraryUnavailable(f"built on POSIX systems only, not on {platform.system()}")
    try:
        return cache_folder("kernels")
    except OSError as error:
        raise LibraryUnavailable(str(error)) from error


def _private_folder(cache: Path) -> Path:
    """The cache folder, created if missing. Raises LibraryUnavailable if other users can write to it."""
    try:
        make_private(cache)
    except OSError as error:
        raise LibraryUnavailable(f"no folder for the library: {error}") from error
    return cache
