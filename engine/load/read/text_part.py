"""The text part of multimodal models: their classes without the modules that a text does not use.

transformers' own class runs, so weights are named, converted and computed as in the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.auto.auto_factory import _get_model_class

from engine.load.read.checkpoint import READ_ERRORS
from engine.model import hooks

# Errors of a model that runs on the meta device, or over a cache that stores nothing.
RUN_ERRORS = (*READ_ERRORS, NotImplementedError, IndexError)


def text_class(auto: Any, config: Any, run: Callable[[Any], object]) -> Any:
    """The class of an Auto class of transformers for `config`, without the modules that a text does not call.

    run  runs a text in a model on the meta device

    `auto` itself if a text uses all modules. Raises whatever the model raises if it cannot be constructed.
    """
    kind = _get_model_class(config, auto._model_mapping)
    if kind.config_class is not type(config):
        # A class of the text part alone.
        return auto
    with torch.device("meta"), _without_missing_towers():
        model = kind._from_config(deepcopy(config), attn_implementation="eager").eval()
    unused = _unused_modules(model, run)
    if not unused:
        return auto

    def construct(self: Any, config: Any, *arguments: Any, **settings: Any) -> None:
        with _without_missing_towers():
            kind.__init__(self, config, *arguments, **settings)
        _remove(self, unused)

    # transformers finds the source of a class by its module, and conversions of weights by its name.
    contents = {
        "__init__": construct,
        "__module__": kind.__module__,
        "_keys_to_ignore_on_load_unexpected": [".*"],
        "from_config": classmethod(lambda text, *arguments, **settings: text._from_config(*arguments, **settings)),
        "unread_modules": unused,
    }
    return type(kind.__name__, (kind,), contents)


def text_parameters(model: Any) -> dict[str, Tensor]:
    """The parameters of the text of a multimodal model, by the names that they have in the class of a text alone."""
    parts = {model.get_decoder(): "model.", model.get_output_embeddings(): "lm_head."}
    prefixes = {f"{name}.": parts[module] for name, module in model.named_modules() if module in parts}
    return {
        prefixes[prefix] + name.removeprefix(prefix): values
        for name, values in model.state_dict().items()
        for prefix in prefixes
        if name.startswith(prefix)
    }


@contextmanager
def _without_missing_towers() -> Iterator[None]:
    """Within the block, models inside another that need a library which is not installed are empty modules."""
    construct = AutoModel.from_config

    def from_config(*arguments: Any, **settings: Any) -> Any:
        try:
            return construct(*arguments, **settings)
        except ImportError:
            return nn.Module()

    AutoModel.from_config = from_config
    try:
        yield
    finally:
        AutoModel.from_config = construct


def _unused_modules(model: Any, run: Callable[[Any], object]) -> tuple[str, ...]:
    """The outermost modules with parameters that a text does not call."""
    used: set[nn.Module] = set()
    with ExitStack() as handles:
        for module in model.modules():
            handles.enter_context(module.register_forward_pre_hook(_recorder(used)))
        try:
            run(model)
            kept = [*hooks.decoder_layers(model)]
        except RUN_ERRORS:
            # It needs values to run.
            kept = [model.get_decoder()]
    kept += [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    used |= {part for module in kept for part in module.modules()}
    unused: list[str] = []
    for name, module in model.named_modules():
        inside = name.startswith(tuple(f"{outer}." for outer in unused))
        if not inside and next(module.parameters(), None) is not None and used.isdisjoint(module.modules()):
            unused.append(name)
    return tuple(unused)


def _recorder(used: set[nn.Module]) -> Callable[..., None]:
    def record(module: nn.Module, _: object) -> None:
        used.add(module)

    return record


def _remove(model: Any, names: tuple[str, ...]) -> None:
    """Replace modules by ones without parameters."""
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, UnreadModule(model.get_submodule(name)))
    left = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = model.all_tied_weights_keys
    model.all_tied_weights_keys = {name: source for name, source in tied.items() if {name, source} <= left}


class UnreadModule(nn.Module):
    """In place of a module that a text does not call: the configuration, dtype and device of models ask it for."""

    location: Tensor

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.config = getattr(module, "config", None)
        self.register_buffer("location", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.location.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        return self.location.dtype
