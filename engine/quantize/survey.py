"""Which layers of a model may be quantised: found by their type and size, and by watching the model run.

While a survey is open, a witness stands in front of every linear layer. It notes who is called, with which rows, and
whose weights are read by others; the self-test's runs are what it sees. Experts are quantised if they are called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.quantize.stacks import Experts, experts_of

# The smallest layers stay as they are, as far as they hold no more than this share of all weights: gates, routers, the
# steps of recurrences. Rounding them gains nothing.
_SMALL_SHARE = 0.01
# How configurations call the number of experts that a router chooses from.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of a model, by the first of its names."""

    name: str
    module: nn.Module

    @property
    def weight(self) -> Tensor:
        """[outputs, columns]"""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight.T if isinstance(self.module, Conv1D) else weight

    @property
    def bias(self) -> Tensor | None:
        """[outputs]"""
        bias = self.module.bias
        return bias if isinstance(bias, Tensor) else None


@dataclass(frozen=True, slots=True)
class LayerNames:
    """A choice by the names of its layers, as files can hold it; see Choice."""

    groups: tuple[tuple[str, ...], ...]
    stay: Mapping[str, int]
    experts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a survey found: the layers to quantise, siblings together, and the number of those that stay, by reason.

    experts  those to quantise, by the first of their modules' names
    """

    groups: tuple[tuple[Layer, ...], ...]
    stay: Counter[str]
    experts: Mapping[str, Experts] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All linear layers to quantise."""
        return tuple(layer for group in self.groups for layer in group)

    @property
    def names(self) -> LayerNames:
        """The choice for another process that loads the same model."""
        groups = tuple(tuple(layer.name for layer in group) for group in self.groups)
        return LayerNames(groups, dict(self.stay), tuple(self.experts))

    @property
    def weights(self) -> int:
        """How many are to be quantised."""
        stacks = (stack.stored for one in self.experts.values() for stack in (one.inner, one.down))
        return sum(one.numel() for one in (*stacks, *(layer.weight for layer in self.layers)))


def choice_of(model: nn.Module, names: LayerNames) -> Choice | None:
    """The choice with these names; None where the model has not all of them."""
    modules = dict(model.named_modules())
    experts = {name: experts_of(modules[name]) for name in names.experts if name in modules}
    found = {name: own for name, own in experts.items() if own is not None}
    wanted = {name for group in names.groups for name in group}
    linear = {name for name in wanted if type(modules.get(name)) in (nn.Linear, Conv1D)}
    if linear != wanted or len(found) != len(names.experts):
        return None
    groups = tuple(tuple(Layer(name, modules[name]) for name in group) for group in names.groups)
    return Choice(groups, Counter(names.stay), found)


class Survey:
    """Watches a model from now on, until `close` puts its own layers back."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._log = model, _Log()
        layers = {name: module for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)}
        self._witnesses = [_Witness(Layer(name, module), self._log) for name, module in layers.items()]
        replace(model, {witness.layer.module: witness for witness in self._witnesses})
        self._experts = {name: one for name, module in model.named_modules() if (one := experts_of(module)) is not None}
        self._heard = set[nn.Module]()
        self._ears = [one.module.register_forward_hook(self._hear) for one in self._experts.values()]

    def close(self) -> Choice:
        """Stop watching; what to quantise."""
        replace(self._model, {witness: witness.layer.module for witness in self._witnesses})
        self._log.end()
        for ear in self._ears:
            ear.remove()
        stay: Counter[str] = Counter()
        routed, small = _routed(self._model), _small([witness.layer for witness in self._witnesses])
        chosen: dict[nn.Module, Layer] = {}
        for witness in self._witnesses:
            reason = _reason(witness, routed, small)
            if reason is None:
                chosen[witness] = witness.layer
            else:
                stay[reason] += 1
        experts = {name: one for name, one in self._experts.items() if one.module in self._heard}
        return Choice(tuple(self._groups(chosen)), stay, experts)

    def _hear(self, module: nn.Module, taken: object, made: object) -> None:
        """A forward hook of experts."""
        self._heard.add(module)

    def _groups(self, chosen: dict[nn.Module, Layer]) -> Iterator[tuple[Layer, ...]]:
        """Those who always came together, and the others one by one; in the order of the model."""
        family = self._log.families()
        done: set[nn.Module] = set()
        for witness in chosen:
            if witness not in done:
                members = [one for one in family.get(witness, (witness,)) if one in chosen]
                done.update(members)
                yield tuple(chosen[one] for one in members)


class _Log:
    """Who was called with the same rows, one right after the other."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None
        self._before: Tensor | None = None
        self._together: list[_Witness] = []
        self._seen: dict[nn.Module, set[tuple[_Witness, ...]]] = {}

    def called(self, witness: _Witness, rows: Tensor) -> None:
        """Note a call."""
        # Rows that were changed in place between two calls are not the same; a NaN is never equal.
        same = rows is self._rows and self._before is not None and torch.equal(rows, self._before)
        if not same or witness in self._together:
            self.end()
            self._rows, self._before = rows, rows.clone()
        self._together.append(witness)

    def end(self) -> None:
        """No call follows."""
        for witness in self._together:
            self._seen.setdefault(witness, set()).add(tuple(self._together))
        self._rows, self._before, self._together = None, None, []

    def families(self) -> dict[nn.Module, tuple[_Witness, ...]]:
        """Each of several who came together every time, to all of these."""
        once = {witness: next(iter(seen)) for witness, seen in self._seen.items() if len(seen) == 1}
        return {witness: group for witness, group in once.items() if all(one in once for one in group)}


class _Witness(nn.Module):
    """Stands in front of a linear layer and notes what happens to it."""

    def __init__(self, layer: Layer, log: _Log) -> None:
        super().__init__()
        self.inner = layer.module
        self.layer, self._log = layer, log
        self.called, self.read = False, False

    @property
    def weight(self) -> Tensor:
        """The layer's own, for somebody else than the layer."""
        weight: _Weight = self.inner.weight.as_subclass(_Weight)  # type: ignore[operator]
        weight.witness = self
        return weight

    @property
    def bias(self) -> Tensor | None:
        """See weight."""
        self.read = True
        return self.inner.bias  # type: ignore[return-value]

    def forward(self, rows: Tensor) -> Tensor:
        """What the layer makes of the rows."""
        self.called = True
        self._log.called(self, rows)
        product: Tensor = self.inner(rows)
        return product


class _Weight(Tensor):
    """A weight that tells its witness when somebody computes with it. To ask for its type is no use of it."""

    witness: _Witness

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in (Tensor.dtype.__get__, Tensor.device.__get__):  # type: ignore[attr-defined]
            for one in args:
                if isinstance(one, _Weight):
                    one.witness.read = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def replace(model: nn.Module, others: dict[nn.Module, nn.Module]) -> None:
    """Put others in the places of some modules, wherever the model holds them."""
    new = set(others.values())
    for parent in list(model.modules()):
        if parent in new:
            continue
        for name, child in parent._modules.items():
            if child is not None and child in others:
                parent._modules[name] = others[child]


def _reason(witness: _Witness, routed: set[int], small: set[nn.Module]) -> str | None:
    """Why a layer stays as it is, if it does."""
    if witness.read:
        return "the model reads their weights itself"
    if not witness.called:
        return "not in use"
    if witness.layer.module in small or witness.layer.weight.shape[0] in routed:
        return "small, or routers"
    return None


def _routed(model: nn.Module) -> set[int]:
    """The widths of routers."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    return {count for name in _EXPERTS if isinstance(count := getattr(text, name, None), int)}


def _small(layers: list[Layer]) -> set[nn.Module]:
    """The smallest layers, by shape, that hold no more than a small share of all weights."""
    shapes = Counter(layer.weight.shape for layer in layers)
    room = _SMALL_SHARE * sum(shape.numel() * count for shape, count in shapes.items())
    small: set[torch.Size] = set()
    for shape, count in sorted(shapes.items(), key=lambda pair: pair[0].numel()):
        room -= shape.numel() * count
        if room < 0:
            break
        small.add(shape)
    return {layer.module for layer in layers if layer.weight.shape in small}
