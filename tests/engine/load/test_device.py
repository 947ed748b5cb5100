"""The device of the settings: its choice, its memory and its defaults, on simulated GPUs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.config import ConfigError, EngineConfig
from engine.errors import DeviceUnavailable, PlanTooLarge
from engine.load.machine.available_memory import available_bytes
from engine.load.machine.device import has_bfloat16, resolve_device, use_device
from engine.load.plan.memory import ModelSizes, plan_memory
from engine.load.read.configuration import choose_dtype
from kvcache.spec import LayerSpec

GIB = 2**30


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs with 24 GiB, of which 20 are free and torch has reserved 3, 2 of these in use."""
    properties = SimpleNamespace(name="NVIDIA L4", total_memory=24 * GIB)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda number: properties,
        "get_device_capability": lambda device: (8, 9),
        "mem_get_info": lambda device: (20 * GIB, 24 * GIB),
        "memory_reserved": lambda device: 3 * GIB,
        "memory_allocated": lambda device: 2 * GIB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
def test_gpu_is_used_with_its_defaults(device: str) -> None:
    found = resolve_device(EngineConfig(device=device))

    assert ("cuda" if device == "auto" else device, 2048) == (found.device, found.chunk)
    assert 100 == resolve_device(EngineConfig(device=device, chunk=100)).chunk


@pytest.mark.usefixtures("no_gpu")
def test_auto_without_a_gpu_is_the_cpu() -> None:
    """Without the settings of GPUs alone."""
    assert EngineConfig(device="cpu") == resolve_device(EngineConfig(device="auto", compile=True))


@pytest.mark.usefixtures("two_gpus")
def test_quantised_weights_run_on_a_gpu() -> None:
    assert "cuda" == resolve_device(EngineConfig(device="auto", quantize="int4")).device


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "", "mps"])
def test_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device must be auto, cpu, cuda or one GPU such as cuda:1"):
        EngineConfig(device=device)


@pytest.mark.usefixtures("two_gpus")
def test_gpu_that_is_not_there_is_refused_with_the_others() -> None:
    with pytest.raises(DeviceUnavailable, match="--device cuda:2: there is no such GPU: torch finds cuda:0: NVIDIA L4"):
        resolve_device(EngineConfig(device="cuda:2"))


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("cuda", "reason"), [(None, "is built for the CPU only; install"), ("13.0", "finds no GPU; the driver must list")]
)
def test_missing_gpu_is_refused_with_a_remedy(cuda: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(DeviceUnavailable, match=f"--device cuda: torch .* {reason}"):
        resolve_device(EngineConfig(device="cuda"))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("memory", "gibibytes"), [(None, 21), ("10GiB", 8), ("50%", 10), ("100%", 21), ("1GiB", 0)])
def test_memory_is_that_of_the_gpu(memory: str | None, gibibytes: int) -> None:
    assert gibibytes * GIB == available_bytes(EngineConfig(device="cuda", memory=memory))


def test_plan_of_a_gpu_has_more_slots_and_most_of_its_memory() -> None:
    """An 8B model beside its weights on a GPU of 24 GB: a tenth is left, besides the activations."""
    layers = (LayerSpec(8, 128, 128),) * 32
    sizes = ModelSizes(
        weights_bytes=15 * GIB,
        layers=layers,
        kv_dtype=torch.bfloat16,
        activation_bytes=2**17,
        max_context=131072,
        sampling_bytes=2**23,
    )
    small = plan_memory(EngineConfig(device="cuda", chunk=2048), sizes, 7 * GIB)
    large = plan_memory(EngineConfig(device="cuda", chunk=2048), sizes, 80 * GIB)
    # Graphs of 9 sizes of a batch and 9 of the context, beside the activations of one.
    graphs = 81 * 2**24 + 64 * (2**17 + 2**23)
    tables = 8 * 64 * 131072
    work = 2**17 * (2048 + 64) + 2**23 * 64 + tables
    eager, divided = (
        plan_memory(EngineConfig(device="cuda", chunk=2048, **settings), sizes, 80 * GIB)[0].workspace_bytes
        for settings in ({"enforce_eager": True}, {"tensor_parallel": 2})
    )

    assert (131072, 64) == large[1:]
    assert (work + graphs, work, work) == (large[0].workspace_bytes, eager, divided)
    assert small[2] in (2, 4)
    assert 0.8 < small[0].cache_bytes / (7 * GIB - small[0].workspace_bytes) <= 0.9
    with pytest.raises(PlanTooLarge, match="or --quantize;"):
        plan_memory(EngineConfig(device="cuda", context=32768, slots=64), sizes, 80 * GIB)


def test_plan_of_a_draft_model_has_the_graphs_of_its_loops() -> None:
    """Steps of up to 16 tokens, and loops of up to 8 sequences, each over 4 sizes of the context."""
    sizes = ModelSizes(GIB, (LayerSpec(8, 128, 128),), torch.bfloat16, 2**17, 2**20)
    config = EngineConfig(device="cuda", model="large", draft_model="small")
    own = config.for_draft("small", context=4096, slots=8, cells=4096)
    graphs, eager = (
        plan_memory(replace(own, enforce_eager=each), sizes, 8 * GIB)[0].workspace_bytes for each in (False, True)
    )

    assert (5 + 4) * 4 * 2**24 + 16 * 2**17 == graphs - eager


def test_plan_of_a_gpu_has_a_pool_of_recurrent_states() -> None:
    """Two for each slot, and two for rows of no sequence; and memory for the states in the prefix tree."""
    sizes = ModelSizes(GIB, (LayerSpec(8, 128, 128),) * 80, torch.bfloat16, 2**17, 2**20)
    config = EngineConfig(device="cuda", slots=4, enforce_eager=True)
    plans = [plan_memory(config, replace(sizes, state_bytes=size), 8 * GIB)[0] for size in (0, 2**20)]

    assert 10 * 2**20 == plans[1].workspace_bytes - plans[0].workspace_bytes
    assert plans[1].cache_bytes <= 0.9 * (8 * GIB - (8 + 1) * GIB / 8)


@pytest.mark.usefixtures("two_gpus")
def test_old_gpus_compute_in_float32(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """They emulate bfloat16; other dtypes are the user's choice."""
    text = SimpleNamespace(get_text_config=lambda: SimpleNamespace(dtype=torch.bfloat16))
    config = EngineConfig(device="cuda")

    assert torch.bfloat16 == choose_dtype(config, text, small=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not has_bfloat16("cuda")
    assert torch.float32 == choose_dtype(config, text, small=False)
    assert "cuda emulates bfloat16: float32 is used; --dtype float16 is faster" in caplog.text
    assert torch.float16 == choose_dtype(EngineConfig(device="cuda", dtype="float16"), text, small=False)


def test_products_on_a_gpu_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TF32 and sums of reduced precision; one GPU is that of the thread."""
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    matmul = torch.backends.cuda.matmul
    flags = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(matmul, flag) for flag in flags]
    try:
        for flag in flags:
            setattr(matmul, flag, True)
        for device in ("cpu", "cuda", "cuda:1"):
            use_device(device)
        found = [getattr(matmul, flag) for flag in flags]
    finally:
        for flag, value in zip(flags, before, strict=True):
            setattr(matmul, flag, value)

    assert ["cuda:1"] == chosen
    assert [False] * 3 == found
