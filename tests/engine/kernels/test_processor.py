"""The variants that a processor runs, on simulated processors."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels.cpu.build import libraries, processor
from engine.native.step_library import step_variants

# Bits of Linux on arm64: HWCAP_ASIMDDP, and HWCAP2_I8MM.
ASIMDDP, I8MM = 1 << 20, 1 << 13


def simulate_x86(
    monkeypatch: pytest.MonkeyPatch, capability: str, *, vnni: bool, bfloat16: bool, flags: tuple[str, ...] = ()
) -> None:
    """A processor as torch and Linux describe it."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)
    monkeypatch.setattr(processor, "_linux_flags", lambda: frozenset(flags))


@pytest.mark.parametrize(
    ("capability", "vnni", "bfloat16", "attention", "linear"),
    [
        ("AVX512", True, True, ("bfloat16", "avx512", "avx2", "generic"), ("vnni", "avx2", "generic")),
        ("AVX512", True, False, ("avx512", "avx2", "generic"), ("vnni", "avx2", "generic")),
        ("AVX512", False, False, ("avx512", "avx2", "generic"), ("avx2", "generic")),
        ("AVX2", True, False, ("avx2", "generic"), ("avx2", "generic")),
        ("DEFAULT", False, False, ("generic",), ("generic",)),
    ],
)
def test_x86(
    monkeypatch: pytest.MonkeyPatch,
    capability: str,
    vnni: bool,
    bfloat16: bool,
    attention: tuple[str, ...],
    linear: tuple[str, ...],
) -> None:
    simulate_x86(monkeypatch, capability, vnni=vnni, bfloat16=bfloat16)

    assert (attention, linear) == (libraries.variants("attention"), libraries.variants("linear"))


@pytest.mark.parametrize(
    ("capability", "linear", "products"),
    [
        ("AVX2", ("avxvnni", "avx2", "generic"), "avxvnni"),
        ("AVX512", ("vnni", "avxvnni", "avx2", "generic"), "avxvnni"),
        ("DEFAULT", ("generic",), None),
    ],
)
def test_x86_with_avx_vnni(
    monkeypatch: pytest.MonkeyPatch, capability: str, linear: tuple[str, ...], products: str | None
) -> None:
    """The step of AVX2 uses the products of AVX-VNNI."""
    simulate_x86(monkeypatch, capability, vnni=capability == "AVX512", bfloat16=False, flags=("avx2", "avx_vnni"))

    assert linear == libraries.variants("linear")
    if products is not None:
        assert ("avx2", products) == step_variants("avx2")


@pytest.mark.parametrize("permitted", [False, True])
def test_x86_with_amx(monkeypatch: pytest.MonkeyPatch, permitted: bool) -> None:
    simulate_x86(monkeypatch, "AVX512", vnni=True, bfloat16=True, flags=("amx_bf16", "amx_tile"))
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: permitted)

    assert ("amx" in libraries.variants("step")) == permitted
    assert step_variants() == (("amx" if permitted else "bfloat16"), "vnni")


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the flags are Linux's")
def test_flags_of_linux_are_read() -> None:
    """On x86 every 64-bit processor has SSE2; the file of other architectures has no such line."""
    assert ("sse2" in processor._linux_flags()) == (platform.machine() in processor.X86)


@pytest.mark.parametrize(
    ("entries", "linear"),
    [
        ({}, ("neon",)),
        ({16: ASIMDDP}, ("dotprod", "neon")),
        ({16: ASIMDDP, 26: I8MM}, ("i8mm", "dotprod", "neon")),
        ({26: I8MM}, ("neon",)),
        ({16: ~ASIMDDP, 26: ~I8MM}, ("neon",)),
    ],
)
def test_arm64_on_linux(monkeypatch: pytest.MonkeyPatch, entries: dict[int, int], linear: tuple[str, ...]) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(processor, "_auxiliary_value", lambda entry: entries.get(entry, 0))

    assert linear == libraries.variants("linear")
    assert ("neon",) == libraries.variants("attention") == libraries.variants("step")
    assert ("neon", linear[0]) == step_variants()


@pytest.mark.parametrize(
    ("found", "linear"),
    [
        ((), ("neon",)),
        (("hw.optional.arm.FEAT_DotProd",), ("dotprod", "neon")),
        (("hw.optional.arm.FEAT_DotProd", "hw.optional.arm.FEAT_I8MM"), ("i8mm", "dotprod", "neon")),
    ],
)
def test_arm64_on_macos(monkeypatch: pytest.MonkeyPatch, found: tuple[str, ...], linear: tuple[str, ...]) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(processor, "_sysctl", lambda name: int(name in found))

    assert linear == libraries.variants("linear")


def test_arm64_on_another_system_has_no_reported_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(sys, "platform", "freebsd14")

    assert ("neon",) == libraries.variants("linear")


def test_other_architectures_are_generic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")

    assert ("generic",) == libraries.variants("linear") == libraries.variants("attention")
    with pytest.raises(libraries.LibraryUnavailable, match="needs AVX2, AVX-512 or NEON"):
        step_variants()


@pytest.mark.skipif(sys.platform != "linux", reason="the auxiliary vector is Linux's")
def test_the_auxiliary_vector_is_read() -> None:
    """AT_PAGESZ is a power of two."""
    page = processor._auxiliary_value(6)

    assert page >= 4096
    assert page & (page - 1) == 0
