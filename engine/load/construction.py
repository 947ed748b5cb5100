"""The construction of models before their weights are read, without torch's kernels in Python.

transformers constructs models on the meta device, where torch computes initial values and rotary frequencies by kernels
in Python; they import sympy, which takes 0.3 s (measured).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights

from engine.load.meta_kernels import import_meta_kernels

Result = TypeVar("Result")

# Functions that make the small tensors of a constructor from numbers.
_NUMBER_FUNCTIONS = frozenset({torch.arange, torch.linspace, torch.tensor})


class _NumbersOnCpu(TorchFunctionMode):
    """Makes tensors of numbers on the CPU instead of the meta device."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if function in _NUMBER_FUNCTIONS and torch.device(options.get("device") or "cpu").type == "meta":
            options = options | {"device": "cpu"}
        return function(*args, **options)


def construct(read: Callable[[], Result]) -> Result:
    """The result of `read`, which makes a model of transformers with all weights of its files.

    Weights get no initial values. transformers sets the buffers that no file has after the weights, on every device.
    """
    try:
        with no_init_weights(), _NumbersOnCpu():
            return read()
    except RuntimeError:
        # The constructor combines such a tensor with one on the meta device, or needs a kernel in Python.
        import_meta_kernels()
        return read()
