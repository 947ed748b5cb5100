"""The tests of the kernels and of the native step pass on arm64, in each variant, run by an arm64 Python."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from engine.kernels.cpu.build.libraries import prebuild
from tests.arm64.machine import MACHINE, MISSING, NEEDED

ROOT = Path(__file__).resolve().parents[2]
# The command of an arm64 Python with the packages of the tests, natively or under qemu-user. Under QEMU 7.2 torch
# crashes in its SVE operations, so the command has `-cpu max,sve=off` or QEMU_CPU=max,sve=off; and with the
# /sys/devices/system/cpu of an x86 host: the system of that Python (-L or chroot) has one of an arm64 machine, with
# possible, present, kernel_max and cpu0/regs/identification/midr_el1. Without one, operations of torch raise "Failed to
# initialize cpuinfo!". Its packages are installed, not found by PYTHONPATH, which the grammar sandbox ignores.
PYTHON = os.environ.get("ARM64_PYTHON", "")
# The longest first.
TESTS = (
    *(f"tests/engine/native/test_{name}.py" for name in ("step", "mlp", "generation", "kv_dtypes", "sampler")),
    *(f"tests/engine/kernels/test_{name}.py" for name in ("attention", "linear", "shared_cells", "blocks", "packing")),
    *(f"tests/engine/native/test_{name}.py" for name in ("draft_loop", "recurrent", "shared_cells", "formats")),
    *(f"tests/engine/native/test_{name}.py" for name in ("rejection", "detection")),
    *(f"tests/engine/kernels/test_{name}.py" for name in ("processor", "layout", "reference")),
)

pytestmark = [
    pytest.mark.arm64,
    pytest.mark.timeout(0),
    pytest.mark.skipif(bool(MISSING), reason=NEEDED),
    pytest.mark.skipif(not PYTHON, reason="ARM64_PYTHON names no arm64 Python"),
]


@pytest.mark.parametrize("file", TESTS)
def test_tests_of_the_kernels_pass(file: str) -> None:
    """With the libraries of this checkout, cross-built into the folder of the prebuilt ones."""
    prebuild(ROOT / "engine/kernels/cpu/prebuilt", MACHINE)
    command = [
        *shlex.split(PYTHON),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "-o",
        "timeout=0",
    ]

    subprocess.run([*command, file], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
