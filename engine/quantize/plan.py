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
_SMALL_LAYERS_SHARE = 0.01
# How configurations call the number of experts that a router chooses from.
_EXPERT_COUNT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")


@dataclass(frozen=True, slots=True)
class LinearLayer:
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
class QuantizationPlanNames:
    """A choice by the names of its layers, as files can hold it; see Choice."""

    groups: tuple[tuple[str, ...], ...]
    stay: Mapping[str, int]
    experts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """What a survey found: the layers to quantise, siblings together, and the number of those that stay, by reason.

    experts  those to quantise, by the first of their modules' names
    """

    groups: tuple[tuple[LinearLayer, ...], ...]
    stay: Counter[str]
    experts: Mapping[str, Experts] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[LinearLayer, ...]:
        """All linear layers to quantise."""
        return tuple(layer for group in self.groups for layer in group)

    @property
    def names(self) -> QuantizationPlanNames:
        """The choice for another process that loads the same model."""
        groups = tuple(tuple(layer.name for layer in group) for group in self.groups)
        return QuantizationPlanNames(groups, dict(self.stay), tuple(self.experts))

    @property
    def weights(self) -> int:
        """How many are to be quantised."""
        stacks = (stack.stored for one in self.experts.values() for stack in (one.up, one.down))
        return sum(one.numel() for one in (*stacks, *(layer.weight for layer in self.layers)))


def plan_from_names(model: nn.Module, names: QuantizationPlanNames) -> QuantizationPlan | None:
    """The choice with these names; None where the model has not all of them."""
    modules = dict(model.named_modules())
    experts = {name: experts_of(modules[name]) for name in names.experts if name in modules}
    found = {name: own for name, own in experts.items() if own is not None}
    wanted = {name for group in names.groups for name in group}
    linear = {name for name in wanted if type(modules.get(name)) in (nn.Linear, Conv1D)}
    if linear != wanted or len(found) != len(names.experts):
        return None
    groups = tuple(tuple(LinearLayer(name, modules[name]) for name in group) for group in names.groups)
    return QuantizationPlan(groups, Counter(names.stay), found)


class LayerSurvey:
    """Watches a model from now on, until `close` puts its own layers back."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._calls = model, _CallLog()
        layers = {name: module for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)}
        self._observed = [_ObservedLinear(LinearLayer(name, module), self._calls) for name, module in layers.items()]
        replace_modules(model, {witness.layer.module: witness for witness in self._observed})
        self._experts = {name: one for name, module in model.named_modules() if (one := experts_of(module)) is not None}
        self._called_experts = set[nn.Module]()
        self._hook_handles = [one.module.register_forward_hook(self._record_experts) for one in self._experts.values()]

    def close(self) -> QuantizationPlan:
        """Stop watching; what to quantise."""
        replace_modules(self._model, {witness: witness.layer.module for witness in self._observed})
        self._calls.end_group()
        for ear in self._hook_handles:
            ear.remove()
        stay: Counter[str] = Counter()
        routed, small = _router_widths(self._model), _small_layers([witness.layer for witness in self._observed])
        chosen: dict[nn.Module, LinearLayer] = {}
        for witness in self._observed:
            reason = _skip_reason(witness, routed, small)
            if reason is None:
                chosen[witness] = witness.layer
            else:
                stay[reason] += 1
        experts = {name: one for name, one in self._experts.items() if one.module in self._called_experts}
        return QuantizationPlan(tuple(self._groups(chosen)), stay, experts)

    def _record_experts(self, module: nn.Module, taken: object, made: object) -> None:
        """A forward hook of experts."""
        self._called_experts.add(module)

    def _groups(self, chosen: dict[nn.Module, LinearLayer]) -> Iterator[tuple[LinearLayer, ...]]:
        """Those who always came together, and the others one by one; in the order of the model."""
        family = self._calls.siblings()
        done: set[nn.Module] = set()
        for witness in chosen:
            if witness not in done:
                members = [one for one in family.get(witness, (witness,)) if one in chosen]
                done.update(members)
                yield tuple(chosen[one] for one in members)


class _CallLog:
    """Who was called with the same rows, one right after the other."""

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._input_copy: Tensor | None = None
        self._same_input: list[_ObservedLinear] = []
        self._groups: dict[nn.Module, set[tuple[_ObservedLinear, ...]]] = {}

    def record(self, witness: _ObservedLinear, rows: Tensor) -> None:
        """Note a call."""
        # Rows that were changed in place between two calls are not the same; a NaN is never equal.
        same = rows is self._input and self._input_copy is not None and torch.equal(rows, self._input_copy)
        if not same or witness in self._same_input:
            self.end_group()
            self._input, self._input_copy = rows, rows.clone()
        self._same_input.append(witness)

    def end_group(self) -> None:
        """No call follows."""
        for witness in self._same_input:
            self._groups.setdefault(witness, set()).add(tuple(self._same_input))
        self._input, self._input_copy, self._same_input = None, None, []

    def siblings(self) -> dict[nn.Module, tuple[_ObservedLinear, ...]]:
        """Each of several who came together every time, to all of these."""
        once = {witness: next(iter(seen)) for witness, seen in self._groups.items() if len(seen) == 1}
        return {witness: group for witness, group in once.items() if all(one in once for one in group)}


class _ObservedLinear(nn.Module):
    """Stands in front of a linear layer and notes what happens to it."""

    def __init__(self, layer: LinearLayer, log: _CallLog) -> None:
        super().__init__()
        self.inner = layer.module
        self.layer, self._calls = layer, log
        self.is_called, self.is_read = False, False

    @property
    def weight(self) -> Tensor:
        """The layer's own, for somebody else than the layer."""
        weight: _ObservedWeight = self.inner.weight.as_subclass(_ObservedWeight)  # type: ignore[operator]
        weight.observed = self
        return weight

    @property
    def bias(self) -> Tensor | None:
        """See weight."""
        self.is_read = True
        return self.inner.bias  # type: ignore[return-value]

    def forward(self, rows: Tensor) -> Tensor:
        """What the layer makes of the rows."""
        self.is_called = True
        self._calls.record(self, rows)
        product: Tensor = self.inner(rows)
        return product


class _ObservedWeight(Tensor):
    """A weight that tells its witness when somebody computes with it. To ask for its type is no use of it."""

    observed: _ObservedLinear

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in (Tensor.dtype.__get__, Tensor.device.__get__):  # type: ignore[attr-defined]
            for one in args:
                if isinstance(one, _ObservedWeight):
                    one.observed.is_read = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def replace_modules(model: nn.Module, others: dict[nn.Module, nn.Module]) -> None:
    """Put others in the places of some modules, wherever the model holds them."""
    new = set(others.values())
    for parent in list(model.modules()):
        if parent in new:
            continue
        for name, child in parent._modules.items():
            if child is not None and child in others:
                parent._modules[name] = others[child]


def _skip_reason(witness: _ObservedLinear, routed: set[int], small: set[nn.Module]) -> str | None:
    """Why a layer stays as it is, if it does."""
    if witness.is_read:
        return "the model reads their weights itself"
    if not witness.is_called:
        return "not in use"
    if witness.layer.module in small or witness.layer.weight.shape[0] in routed:
        return "small, or routers"
    return None


def _router_widths(model: nn.Module) -> set[int]:
    """The widths of routers."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    return {count for name in _EXPERT_COUNT_FIELDS if isinstance(count := getattr(text, name, None), int)}


def _small_layers(layers: list[LinearLayer]) -> set[nn.Module]:
    """The smallest layers, by shape, that hold no more than a small share of all weights."""
    shapes = Counter(layer.weight.shape for layer in layers)
    room = _SMALL_LAYERS_SHARE * sum(shape.numel() * count for shape, count in shapes.items())
    small: set[torch.Size] = set()
    for shape, count in sorted(shapes.items(), key=lambda pair: pair[0].numel()):
        room -= shape.numel() * count
        if room < 0:
            break
        small.add(shape)
    return {layer.module for layer in layers if layer.weight.shape in small}
