"""Replaces the linear layers and the experts of a loaded model by quantised ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.config import Quantize
from engine.kernels import linear
from engine.kernels.dispatch import best_linear
from engine.kernels.linear import PrepareMatrices
from engine.kernels.packing import GROUP, Bits, PackedMatrix, PackedStorage, pack
from engine.quantize.experts import QuantizedExperts
from engine.quantize.layers import QuantizedLinear, SharedInputGroup
from engine.quantize.plan import LinearLayer, QuantizationPlan, replace_modules
from engine.quantize.stacks import ExpertStack, experts_of
from engine.quantize.store import WeightStore
from engine.types.status import QuantizationEstimate

log = logging.getLogger("cellar.engine")

_BITS: dict[Quantize, Bits | None] = {"none": None, "int8": 8, "int4": 4}
# Under "auto" models of fewer weights stay as they are: they are fast, and small enough, without.
_AUTO_MIN_WEIGHTS = 2**25
# Under "auto" 8 bits are taken where the weights then take no more than this share of the memory.
_AUTO_INT8_SHARE = 0.5
# Of each weight, for the scale that its group shares (engine/kernels/packing.py).
_SCALE_BITS = 16 / GROUP


def bits_for(settings: Quantize, plan: QuantizationPlan, available_bytes: int) -> Bits | None:
    """How many bits the chosen layers get; None: they stay as they are."""
    if settings != "auto":
        return _BITS[settings]
    return None if best_linear() is linear.prepare else _auto_bits(plan.weights, available_bytes)


def estimate(model: nn.Module, available_bytes: int) -> QuantizationEstimate | None:
    """What quantising a model as it was read would bring; None where it has no linear layers."""
    own: list[Tensor] = []
    for module in model.modules():
        if type(module) in (nn.Linear, Conv1D):
            own += module.parameters(recurse=False)
        elif (experts := experts_of(module)) is not None:
            own += (experts.up.stored, experts.down.stored)
    weights, read = sum([one.numel() for one in own]), sum([one.nbytes for one in own])
    if not weights:
        return None
    auto = _auto_bits(weights, available_bytes)
    reads = tuple((f"int{bits}", weights * (bits + _SCALE_BITS) / 8 / read) for bits in (8, 4))
    return QuantizationEstimate(reads, None if auto is None else f"int{auto}")


def _auto_bits(weights: int, available_bytes: int) -> Bits | None:
    if weights < _AUTO_MIN_WEIGHTS:
        return None
    return 8 if weights < _AUTO_INT8_SHARE * available_bytes else 4


def quantize(model: nn.Module, plan: QuantizationPlan, store: WeightStore, prepare: PrepareMatrices) -> None:
    """Replace the chosen layers and experts, whose own weights leave the memory one by one.

    What replaces them is read from the store, or made, with a progress bar where a person looks on, and stored.
    """
    others: dict[nn.Module, nn.Module] = {}
    with _QuantizedMatrices(store, plan) as matrices:
        for group in plan.groups:
            others |= _quantized_linears(
                group, [matrices.quantize(layer.name, layer.weight) for layer in group], prepare
            )
        for name, experts in plan.experts.items():
            inner, down = (_quantize_stack(matrices, name, stack) for stack in (experts.up, experts.down))
            others[experts.module] = QuantizedExperts(experts, inner, down, prepare)
    replace_modules(model, others)
    matrices.save()
    _log_summary(model, plan, store.bits)


def bytes_of(model: nn.Module) -> int:
    """What a model's weights take, quantised or not."""
    own = sum(parameter.nbytes for parameter in model.parameters())
    layers = sum(buffer.nbytes for layer in _layers(model) for buffer in layer.buffers(recurse=False))
    return own + layers + sum(experts.bytes for experts in _experts(model))


class _QuantizedMatrices:
    """The quantised matrices of a model, by name: those of the store, or new ones. Shows a bar while it is open."""

    def __init__(self, store: WeightStore, choice: QuantizationPlan) -> None:
        shapes = dict(_shapes(choice))
        self._store, self._stored = store, store.read(shapes)
        self._packed = dict[str, PackedMatrix]()
        self._room = PackedStorage(shapes.values() if self._stored is None else (), store.bits)
        console = Console(stderr=True)
        self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        what = f"quantize to int{store.bits}" if self._stored is None else "take quantized weights"
        self._task = self._bar.add_task(what, total=choice.weights)

    def __enter__(self) -> _QuantizedMatrices:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def quantize(self, name: str, weight: Tensor) -> PackedMatrix:
        """The one of a name, whose own weights are [outputs, columns]."""
        matrix = pack(weight, self._store.bits, self._room) if self._stored is None else self._stored[name]
        self._packed[name] = matrix
        self._bar.advance(self._task, weight.numel())
        return matrix

    def save(self) -> None:
        """Store the new ones."""
        if self._stored is None:
            self._store.write(self._packed)


def _shapes(choice: QuantizationPlan) -> Iterator[tuple[str, tuple[int, int]]]:
    """All matrices' names, outputs and columns."""
    for layer in choice.layers:
        yield layer.name, (layer.weight.shape[0], layer.weight.shape[1])
    for name, experts in choice.experts.items():
        for stack in (experts.up, experts.down):
            count, outputs, columns = stack.weight.shape
            yield from ((_matrix_name(name, stack, number), (outputs, columns)) for number in range(count))


def _matrix_name(experts: str, stack: ExpertStack, number: int) -> str:
    return f"{experts}.{stack.parameter}.{number}"


def _quantize_stack(matrices: _QuantizedMatrices, name: str, stack: ExpertStack) -> list[PackedMatrix]:
    """The matrices of all experts; nothing is left of the parameter."""
    taken = [matrices.quantize(_matrix_name(name, stack, number), weight) for number, weight in enumerate(stack.weight)]
    stack.module.register_parameter(stack.parameter, None)
    return taken


def _layers(model: nn.Module) -> Iterator[QuantizedLinear]:
    return (module for module in model.modules() if isinstance(module, QuantizedLinear))


def _experts(model: nn.Module) -> Iterator[QuantizedExperts]:
    return (module for module in model.modules() if isinstance(module, QuantizedExperts))


def _quantized_linears(
    group: Sequence[LinearLayer], matrices: Sequence[PackedMatrix], prepare: PrepareMatrices
) -> dict[nn.Module, QuantizedLinear]:
    """What stands for the layers of one group from now on; what is left of these is empty."""
    siblings = SharedInputGroup(prepare(matrices))
    pairs = enumerate(zip(group, matrices, strict=True))
    new = {one.module: QuantizedLinear(siblings, number, packed, one) for number, (one, packed) in pairs}
    for layer in group:
        layer.module.register_parameter("weight", None)
    return new


def _log_summary(model: nn.Module, choice: QuantizationPlan, bits: Bits) -> None:
    """One line in the log: what is quantised, and what is not, and why."""
    counts = [f"{count} linear layers ({reason})" for reason, count in choice.stay.items()]
    # Convolutions have three dimensions too.
    stay = sum(
        parameter.numel()
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3 and not isinstance(module, nn.Conv1d)
    )
    if stay:
        counts.append(f"{stay / 1e6:.1f} million weights of experts")
    layers, experts = list(_layers(model)), list(_experts(model))
    weights = sum(layer.weights for layer in layers) + sum(one.weights for one in experts)
    done = f"{len(choice.layers)} linear layers" + (f", the experts of {len(experts)} layers" if experts else "")
    kept = ", ".join(counts) or "the rest is no linear layer"
    log.info("int%d: %s, %.1f million weights; as they were: %s", bits, done, weights / 1e6, kept)
