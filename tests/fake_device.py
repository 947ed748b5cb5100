"""A device that is not there: its tensors have numbers in CPU memory, and every transfer to and from it is recorded.

    with fake_device() as device:
        load(EngineConfig(device=FAKE), ...)    # runs on the CPU, as if on a device
        device.uploads, device.waits            # the lines of each

An operation that mixes tensors of both devices raises at its line, as on CUDA.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from engine.load.machine.device import DeviceMemory

FAKE = "fake:0"
_ROOT = Path(__file__).parents[1]
_OWN_FOLDERS = (str(_ROOT / "engine"), str(_ROOT / "kvcache"))
_aten = torch.ops.aten

# The shape of their outputs, or their output itself, depends on numbers.
_WAITS = {
    _aten._local_scalar_dense,
    _aten.equal,
    _aten.is_nonzero,
    _aten.masked_select,
    _aten.nonzero,
    _aten.unique_consecutive,
    _aten.unique_dim,
    _aten._unique,
    _aten._unique2,
    _aten.bincount,
}

_ACCELERATORS = ("_get_accelerator", "_accelerator_getAccelerator")


@dataclass(frozen=True, slots=True)
class Transfer:
    """An upload to the device, or a wait for its numbers.

    line  of the package, such as engine/sample/sampler.py:107
    """

    kind: Literal["upload", "wait"]
    line: str


class MixedDevicesError(RuntimeError):
    """An operation on tensors of different devices."""


class DeviceTensor(Tensor):
    """A tensor of the fake device with its numbers in `memory`, a tensor of the CPU."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor) -> DeviceTensor:
        # A view of a tensor from outside of inference mode cannot be an inference tensor.
        with torch.inference_mode(False):
            return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
                cls,
                memory.size(),
                strides=memory.stride(),
                storage_offset=memory.storage_offset(),
                dtype=memory.dtype,
                device=FAKE,
            )

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} on the fake device outside of fake_device")


@dataclass
class Recorder:
    """The transfers since the last `clear`."""

    transfers: list[Transfer] = field(default_factory=list)
    _copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def start_copy(self, target: Tensor, numbers: Tensor) -> None:
        """Begin a copy to host memory that ends with `finish_copies`; the target has other numbers until then."""
        target.copy_(numbers).add_(1)
        self._copies.append((target, numbers))

    def finish_copies(self) -> None:
        """Wait for the copies to host memory."""
        if self._copies:
            self.add("wait")
        for target, numbers in self._copies:
            target.copy_(numbers)
        self._copies.clear()

    @property
    def uploads(self) -> list[str]:
        """The lines of all uploads."""
        return [each.line for each in self.transfers if each.kind == "upload"]

    @property
    def waits(self) -> list[str]:
        """The lines of all waits."""
        return [each.line for each in self.transfers if each.kind == "wait"]

    def clear(self) -> None:
        """Forget all transfers."""
        self.transfers.clear()

    def add(self, kind: Literal["upload", "wait"]) -> None:
        """Record a transfer at the current line."""
        self.transfers.append(Transfer(kind, _own_line()))


@contextmanager
def fake_device() -> Iterator[Recorder]:
    """The device exists inside the block, with 8 GiB."""
    _register()
    recorder = Recorder()
    names = patch("engine.config._DEVICE", re.compile(f"cpu|{FAKE}"))
    memory = patch("engine.load.machine.available_memory.device_memory", lambda device: DeviceMemory(2**33, 2**33, 0))
    copies = patch("kvcache.host_copies.HostCopies.wait", lambda self: recorder.finish_copies())
    with names, memory, copies, _Numbers(), _Operations(recorder):
        yield recorder


class _Operations(TorchDispatchMode):
    """Runs operations on the device with the CPU."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        _map((*args, *kwargs.values()), tensors.append)
        on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type == "fake"
        if not on_device and not to_device:
            return function(*args, **kwargs)
        if _is_composite(function):
            # In inference mode, such operations arrive whole.
            with self:
                return function.decompose(*args, **kwargs)
        packet = function.overloadpacket
        if packet is _aten._to_copy:
            return self._copy_of(args[0], kwargs, to_device=to_device or target is None)
        if packet is _aten.copy_ and len(on_device) == 1:
            return self._copy_into(*args)
        self._check(packet, tensors, args)
        if packet is _aten.histc:
            # That of CUDA takes integers.
            return DeviceTensor(function(args[0].memory.float(), *args[1:], **kwargs).to(args[0].dtype))
        inner = kwargs | ({"device": "cpu"} if to_device else {})
        output = function(*_inner(args), **{name: _inner(value) for name, value in inner.items()})
        # An operation in place returns its argument.
        written = {id(tensor.memory): tensor for tensor in on_device}
        return _map(output, lambda own: written[id(own)] if id(own) in written else DeviceTensor(own))

    def _copy_of(self, source: Tensor, kwargs: dict[str, Any], *, to_device: bool) -> Tensor:
        """A copy on the device or, after a wait, on the CPU."""
        inner = kwargs | ({"device": "cpu"} if "device" in kwargs else {})
        copied = _aten._to_copy(_inner(source), **inner)
        if isinstance(source, DeviceTensor) != to_device:
            self._recorder.add("upload" if to_device else "wait")
        return DeviceTensor(copied) if to_device else copied

    def _copy_into(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(source, DeviceTensor) and non_blocking:
            # As from CUDA to page-locked memory: the numbers come later.
            self._recorder.start_copy(target, source.memory.to(target.dtype, copy=True))
            return target
        self._recorder.add("upload" if isinstance(target, DeviceTensor) else "wait")
        _inner(target).copy_(_inner(source))
        return target

    def _check(self, packet: Any, tensors: list[Tensor], args: Any) -> None:
        """Raise for mixed devices, and record a wait."""
        # CUDA takes numbers from the CPU as well.
        strange = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor) and tensor.dim() > 0]
        if strange:
            raise MixedDevicesError(f"{packet} at {_own_line()}: a tensor of the CPU with one of the device")
        by_mask = packet in (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if packet in _WAITS or by_mask:
            self._recorder.add("wait")


class _Numbers(TorchFunctionMode):
    """Makes the tensors of torch.tensor on the CPU, then copies them: the device is not there. Reads lists likewise."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        target = kwargs.get("device")
        if function is torch.tensor and target is not None and torch.device(target).type == "fake":
            return function(*args, **kwargs | {"device": "cpu"}).to(target)
        if function is Tensor.tolist and isinstance(args[0], DeviceTensor):
            return args[0].cpu().tolist()
        return function(*args, **kwargs)


@cache
def _is_composite(function: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key))


@cache
def _register() -> None:
    accelerators: dict[str, Any] = {name: getattr(torch._C, name)() for name in _ACCELERATORS}
    _setup_privateuseone_for_python_backend("fake")
    # It would stay the accelerator of the process, over which transformers divides models in later tests.
    for name, before in accelerators.items():
        setattr(torch._C, name, lambda before=before: before)


def _inner(value: Any) -> Any:
    return _map(value, lambda tensor: tensor.memory if isinstance(tensor, DeviceTensor) else tensor)


def _map(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The value with its tensors changed, in lists and tuples too; torch's own function takes most of a test's time."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_map(each, change) for each in value) if type(value) in (list, tuple) else value


def _own_line() -> str:
    """The innermost line of the engine or of the cache."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OWN_FOLDERS):
            return f"{Path(frame.f_code.co_filename).relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside"
