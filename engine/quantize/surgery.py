"""Replaces the linear layers of a loaded model by quantised ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import track
from torch import nn

from engine.config import Quantize
from engine.kernels import linear
from engine.kernels.choice import multiplies
from engine.kernels.linear import Prepare
from engine.kernels.packing import Bits, Packed, Room, pack
from engine.quantize.layers import QuantizedLinear, Siblings
from engine.quantize.store import Store
from engine.quantize.survey import Choice, Layer, replace

log = logging.getLogger("cellar.engine")

_BITS: dict[Quantize, Bits | None] = {"none": None, "int8": 8, "int4": 4}
# Under "auto" models of fewer weights stay as they are: they are fast, and small enough, without.
_FEW_WEIGHTS = 2**25
# Under "auto" 8 bits are taken where the weights then take no more than this share of the memory.
_EIGHT_BIT_SHARE = 0.5


def bits_for(settings: Quantize, choice: Choice, available_bytes: int) -> Bits | None:
    """How many bits the chosen layers get; None: they stay as they are."""
    if settings != "auto":
        return _BITS[settings]
    weights = sum(layer.weight.numel() for layer in choice.layers)
    if weights < _FEW_WEIGHTS or multiplies() is linear.prepare:
        return None
    return 8 if weights < _EIGHT_BIT_SHARE * available_bytes else 4


def quantize(model: nn.Module, choice: Choice, store: Store, prepare: Prepare) -> None:
    """Replace the chosen layers, whose own weights leave the memory one by one.

    What replaces them is read from the store, or made, with a progress bar where a person looks on, and stored.
    """
    shapes = {layer.name: (layer.weight.shape[0], layer.weight.shape[1]) for layer in choice.layers}
    known = store.read(shapes)
    made, room = dict[str, Packed](), Room(shapes.values() if known is None else (), store.bits)
    others: dict[nn.Module, nn.Module] = {}
    for group in _shown(choice, f"quantize to int{store.bits}" if known is None else "take quantized weights"):
        matrices = [pack(layer.weight, store.bits, room) if known is None else known[layer.name] for layer in group]
        made |= {layer.name: matrix for layer, matrix in zip(group, matrices, strict=True)}
        others |= _exchanged(group, matrices, prepare)
    replace(model, others)
    if known is None:
        store.write(made)
    _tell(model, choice, store.bits)


def bytes_of(model: nn.Module) -> int:
    """What a model's weights take, quantised or not."""
    own = sum(parameter.nbytes for parameter in model.parameters())
    return own + sum(buffer.nbytes for layer in _quantized(model) for buffer in layer.buffers(recurse=False))


def _quantized(model: nn.Module) -> Iterator[QuantizedLinear]:
    return (module for module in model.modules() if isinstance(module, QuantizedLinear))


def _exchanged(
    group: Sequence[Layer], matrices: Sequence[Packed], prepare: Prepare
) -> dict[nn.Module, QuantizedLinear]:
    """What stands for the layers of one group from now on; what is left of these is empty."""
    siblings = Siblings(prepare(matrices))
    pairs = enumerate(zip(group, matrices, strict=True))
    new = {one.module: QuantizedLinear(siblings, number, packed, one) for number, (one, packed) in pairs}
    for layer in group:
        layer.module.register_parameter("weight", None)
    return new


def _shown(choice: Choice, what: str) -> Iterable[tuple[Layer, ...]]:
    """The groups, with a bar on a terminal."""
    console = Console(stderr=True)
    return track(choice.groups, what, console=console, disable=not console.is_terminal, transient=True)


def _tell(model: nn.Module, choice: Choice, bits: Bits) -> None:
    """One line in the log: what is quantised, and what is not, and why."""
    counts = [f"{count} linear layers ({reason})" for reason, count in choice.stay.items()]
    # Convolutions have three dimensions too.
    experts = sum(
        parameter.numel()
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3 and not isinstance(module, nn.Conv1d)
    )
    if experts:
        counts.append(f"{experts / 1e6:.1f} million weights of experts")
    weights = sum(layer.weights for layer in _quantized(model))
    kept = ", ".join(counts) or "the rest is no linear layer"
    log.info(
        "int%d: %d linear layers, %.1f million weights; as they were: %s", bits, len(choice.layers), weights / 1e6, kept
    )
