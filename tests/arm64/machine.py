"""Cross compiler and emulator: `aarch64-linux-gnu-g++` and qemu-user."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from engine.kernels.cpu.build import libraries

MACHINE = "aarch64"
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = next(filter(shutil.which, ("qemu-aarch64-static", "qemu-aarch64")), None)
# Debian's libraries for arm64 programs of the cross compiler.
SYSTEM = "/usr/aarch64-linux-gnu"
MISSING = [name for name, found in ((COMPILER, shutil.which(COMPILER)), ("qemu-aarch64", EMULATOR)) if not found]
NEEDED = f"not found: {', '.join(MISSING)} (apt-get install g++-aarch64-linux-gnu qemu-user-static)"
# The oldest processor of QEMU that runs each variant: a newer instruction ends the program.
PROCESSORS = {"neon": "cortex-a72", "dotprod": "neoverse-n1", "i8mm": "max"}


def compile_program(source: Path, program: Path) -> None:
    """Compile a program for arm64."""
    command = [COMPILER, "-std=c++17", "-O2", f"-I{libraries.SOURCE}", str(source), "-o", str(program), "-ldl"]
    subprocess.run(command, check=True)


def compile_library(kernel: str, variant: str, folder: Path) -> Path:
    """Build a variant of a kernel for arm64."""
    library = folder / f"{kernel}-{variant}.so"
    libraries._build([COMPILER], kernel, libraries.KERNELS[kernel][variant], library)
    return library


def run(processor: str, *command: str | Path) -> None:
    """Run an arm64 program on a processor. Raises CalledProcessError."""
    assert EMULATOR is not None
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run([EMULATOR, "-cpu", processor, "-L", SYSTEM, *map(str, command)], check=True, env=environment)
