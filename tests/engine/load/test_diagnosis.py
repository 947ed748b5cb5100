"""Findings of `cellar doctor` on simulated machines."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path

import pytest

from engine.load.machine.diagnosis import Finding, compiler_command, diagnose
from engine.load.machine.machine import Kernel, Machine, examine, find_conflicts, find_gpus

NATIVE = {
    "attention": Kernel(variants=("avx512", "avx2", "generic"), library="prebuilt"),
    "linear": Kernel(variants=("vnni", "avx2", "generic"), library="prebuilt"),
    "step": Kernel(variants=("vnni", "avx2"), library="prebuilt"),
}
GOOD = Machine(
    system="Linux",
    architecture="x86_64",
    distribution=("debian",),
    python="3.11.7",
    kernels=NATIVE,
    compiler="/usr/bin/g++",
    processors=8,
    all_processors=8,
    memory_bytes=32 * 2**30,
    available_bytes=24 * 2**30,
    cache="/home/user/.cache/kvcellar",
    cache_free_bytes=100 * 2**30,
    cache_error=None,
    gpus=(),
    torch_gpus=(),
    versions={"torch": "2.13.0", "transformers": "5.23.0"},
    conflicts=(),
    hub="https://hub.example.org",
    hub_error=None,
)


def findings(machine: Machine) -> dict[str, Finding]:
    """By topic."""
    return {finding.topic: finding for finding in diagnose(machine)}


def problems(machine: Machine) -> set[str]:
    """Topics with a problem."""
    return {finding.topic for finding in diagnose(machine) if finding.level == "problem"}


def test_good_machine_has_no_problem() -> None:
    assert set() == problems(GOOD)
    assert "attention (avx512), linear (vnni), step (vnni); prebuilt" == findings(GOOD)["kernels"].text


@pytest.mark.parametrize(
    ("system", "distribution", "command"),
    [
        ("Linux", ("ubuntu", "debian"), "sudo apt-get install g++"),
        ("Linux", ("rocky", "rhel", "centos", "fedora"), "sudo dnf install gcc-c++"),
        ("Linux", ("opensuse-leap", "suse", "opensuse"), "sudo zypper install gcc-c++"),
        ("Linux", (), "install g++ or clang++ with the package manager of the system"),
        ("Darwin", (), "xcode-select --install"),
    ],
)
def test_machine_without_compiler(system: str, distribution: tuple[str, ...], command: str) -> None:
    """Without prebuilt kernels that is a problem, with the command of the distribution."""
    kernels = {name: replace(kernel, library=None) for name, kernel in NATIVE.items()}
    bare = replace(GOOD, system=system, distribution=distribution, compiler=None, kernels=kernels)
    found = findings(bare)["kernels"]

    assert {"kernels"} == problems(bare)
    assert "attention, linear, step are not prebuilt, and there is no C++ compiler" in found.text
    assert "2 to 6 times slower" in found.text
    assert command == found.remedy == compiler_command(bare)


def test_prebuilt_kernels_need_no_compiler() -> None:
    bare = replace(GOOD, compiler=None)

    assert set() == problems(bare)
    assert ("ok", "none, and none is necessary") == (findings(bare)["compiler"].level, findings(bare)["compiler"].text)


def test_kernels_to_compile_are_no_problem() -> None:
    fresh = replace(GOOD, kernels={name: replace(kernel, library=None) for name, kernel in NATIVE.items()})

    assert set() == problems(fresh)
    assert "compiled at the first start" in findings(fresh)["kernels"].text


def test_machine_without_avx2() -> None:
    kernels = {
        "attention": Kernel(variants=("generic",), library="prebuilt"),
        "linear": Kernel(variants=("generic",), library="prebuilt"),
        "step": Kernel(variants=(), library=None),
    }
    found = findings(replace(GOOD, kernels=kernels))["kernels"]

    assert ("problem", True) == (found.level, "the processor lacks AVX2" in found.text)
    assert "2 to 6 times slower" in found.text
    assert found.remedy
    assert "-cpu host" in found.remedy


def test_arm64_machine_with_neon_kernels() -> None:
    kernels = {name: Kernel(variants=("i8mm", "dotprod", "neon"), library="compiled") for name in NATIVE}
    arm = replace(GOOD, architecture="aarch64", kernels=kernels)

    assert set() == problems(arm)
    assert "attention (i8mm), linear (i8mm), step (i8mm); compiled" == findings(arm)["kernels"].text


def test_architecture_without_kernels() -> None:
    kernels = {name: Kernel(variants=("generic",), library=None) for name in NATIVE}
    found = findings(replace(GOOD, architecture="riscv64", kernels=kernels))["kernels"]

    assert "problem" == found.level
    assert "there are none for riscv64" in found.text
    assert "use x86-64 or arm64" == found.remedy


@pytest.mark.parametrize(
    ("change", "topic", "words"),
    [
        ({"available_bytes": 2**30}, "memory", "1.0 GiB free"),
        ({"cache_error": "/home is not writable"}, "cache", "at every start"),
        ({"cache_free_bytes": 10**9}, "cache", "1.0 GB free"),
        ({"conflicts": ("torch 2.9 is installed, torch>=2.10 is required",)}, "packages", "torch 2.9"),
    ],
)
def test_problems_have_a_remedy(change: dict[str, object], topic: str, words: str) -> None:
    machine = replace(GOOD, **change)  # type: ignore[arg-type]
    found = findings(machine)[topic]

    assert {topic} == problems(machine)
    assert words in found.text
    assert found.remedy


@pytest.mark.parametrize(
    ("change", "topic", "words"),
    [
        ({"gpus": ("NVIDIA H200",)}, "gpu", "torch 2.13.0 cannot use it"),
        ({"processors": 2}, "processors", "2 of 8"),
        ({"hub_error": "timed out"}, "hub", "unreachable (timed out)"),
    ],
)
def test_notes_are_no_problems(change: dict[str, object], topic: str, words: str) -> None:
    machine = replace(GOOD, **change)  # type: ignore[arg-type]

    assert set() == problems(machine)
    assert "note" == findings(machine)[topic].level
    assert words in findings(machine)[topic].text


def test_this_machine_is_examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    machine = examine()

    assert 1 <= machine.processors <= machine.all_processors
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert (str(tmp_path / "kvcellar"), None) == (machine.cache.rstrip("/"), machine.cache_error)
    assert {"attention", "linear", "step"} == machine.kernels.keys()
    assert "http://127.0.0.1:9" == machine.hub
    assert machine.hub_error
    assert diagnose(machine)


def test_packages_outside_the_limits_are_conflicts(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["torch>=99", "numpy>=2.0", "no-such-package>=1", 'absent>=1; extra == "bench"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    first, second = find_conflicts()

    assert first.startswith("torch ")
    assert first.endswith("is installed, torch>=99 is required")
    assert "no-such-package>=1 is not installed" == second


def test_gpus_are_found_by_their_driver(tmp_path: Path) -> None:
    assert () == find_gpus(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert ("an AMD GPU",) == find_gpus(tmp_path)
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t NVIDIA H200\nIRQ: 1\n")
    assert ("NVIDIA H200",) == find_gpus(tmp_path)
