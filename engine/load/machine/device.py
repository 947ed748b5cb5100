"""The device of the models: its choice by the settings, its memory and its number formats."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.config import EngineConfig
from engine.errors import DeviceUnavailable
from engine.types.sizes import format_size

# Prompt tokens of a step on a GPU: fewer leave it idle.
_GPU_CHUNK = 2048
# The first compute capability that multiplies bfloat16; older GPUs emulate it.
_BFLOAT16_CAPABILITY = (8, 0)
_VERSION = torch.__version__.partition("+")[0]
GPU_TORCH_REMEDY = (
    f"install its build for the GPU: uv pip install --torch-backend auto --reinstall-package torch torch=={_VERSION}"
)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device in bytes: free for this process, of all, and allocated by it."""

    free_bytes: int
    total_bytes: int
    allocated_bytes: int


def resolve_device(config: EngineConfig) -> EngineConfig:
    """The settings with the device cpu or a GPU that is there, and its defaults. Raises DeviceUnavailable."""
    if config.device == "auto":
        has_gpu = torch.cuda.is_available()
        config = replace(config, device="cuda" if has_gpu else "cpu", compile=config.compile and has_gpu)
    if config.device == "cpu":
        return config
    reason = _unavailable_reason(config.device)
    if reason is not None:
        raise DeviceUnavailable(config.device, reason)
    return replace(config, chunk=_GPU_CHUNK) if config.chunk == EngineConfig().chunk else config


def use_device(device: str) -> None:
    """Make a device that of this thread, with exact products."""
    if torch.device(device).type != "cuda":
        return
    if torch.device(device).index is not None:
        torch.cuda.set_device(device)
    # TF32 and sums in bfloat16 are faster, and lose digits.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def device_memory(device: str) -> DeviceMemory:
    """The memory of a GPU."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    # torch keeps freed memory for its next tensors.
    return DeviceMemory(free + torch.cuda.memory_reserved(device) - allocated, total, allocated)


def has_bfloat16(device: str) -> bool:
    """Whether a device multiplies bfloat16 faster than float32."""
    if device == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.device(device).type != "cuda" or torch.cuda.get_device_capability(device) >= _BFLOAT16_CAPABILITY


def describe_gpus() -> tuple[str, ...]:
    """The GPUs that torch can use, each as cuda:0 with its name and memory."""
    if not torch.cuda.is_available():
        return ()
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(f"cuda:{number}: {gpu.name}, {format_size(gpu.total_memory)}" for number, gpu in enumerate(properties))


def no_gpu_reason() -> str:
    """Why torch can use no GPU, and the remedy."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for the CPU only; {GPU_TORCH_REMEDY}"
    return f"torch {torch.__version__} finds no GPU; the driver must list one (nvidia-smi), also inside a container"


def _unavailable_reason(device: str) -> str | None:
    """None: the device is there."""
    if torch.device(device).type != "cuda":
        return None
    if not torch.cuda.is_available():
        return no_gpu_reason()
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        return f"there is no such GPU: torch finds {'; '.join(describe_gpus())}"
    return None
