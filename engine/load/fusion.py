"""Norms, rotations and dense MLPs compiled by torch.compile, which fuses their elementwise operations into few kernels.

Attention and recurrent layers call the cache, which no compiled graph may contain, so only functions without side
effects are compiled. Modules of one class share their compilations: one for a single token, one for any number of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import activations

from engine.load.read.checkpoint import error_line
from engine.model.layers import calibrate
from engine.model.margins import within

log = logging.getLogger("cellar.engine")

_Function: TypeAlias = Callable[..., Any]

# Numbers of tokens of the check: torch.compile distinguishes one from more.
_TOKENS = (1, 8)
# Compilations of one function, by the width and the dimensions of its input.
_MOST_COMPILATIONS = 16
# Largest error in machine epsilons of the dtype, relative to the output: of sums in another order.
_ROUNDING_FACTOR = 4
# The functions of transformers that rotate queries and keys begin with it.
_ROTATION = "apply_rotary"
# Modules with the classes of activations.
_ACTIVATIONS = (nn.SiLU.__module__, activations.__name__)


def inductor(function: _Function) -> _Function:
    """The function compiled by torch's default compiler, at its first call."""
    # Fused operations round to the dtype as single ones do.
    compiled: _Function = torch.compile(  # type: ignore[call-overload]
        function,
        dynamic=True,
        fullgraph=True,
        options={"emulate_precision_casts": True},
        recompile_limit=_MOST_COMPILATIONS,
        isolate_recompiles=True,
    )
    return compiled


def fuse(model: nn.Module, vocabulary: int, compiler: Callable[[_Function], _Function] = inductor) -> tuple[str, ...]:
    """Compile the norms, rotations and dense MLPs of a model that runs packed; their names.

    Each is compared with the function itself in a forward of the model. A function with another output, or that cannot
    be compiled, stays as it is, with a warning. Later calls compile nothing: inputs of other dimensions run as before.
    """
    began = time.monotonic()
    checked = {function: _Checked(function, compiler(function)) for function in _functions(model)}
    _install(model, checked)
    with torch.compiler.set_stance("default"):
        for tokens in _TOKENS:
            calibrate(model, vocabulary, tokens=tokens)
    torch.compiler.set_stance("eager_on_recompile")
    _install(model, {function: check.compiled for function, check in checked.items() if check.agrees})
    for check in checked.values():
        if check.failure is not None:
            log.warning("%s is not compiled: %s", check.name, check.failure)
    fused = tuple(sorted(check.name for check in checked.values() if check.agrees))
    log.info("compiled in %.1f s: %s", time.monotonic() - began, ", ".join(fused) or "nothing")
    return fused


class _Checked:
    """A function that compares its output with that of its compiled form.

    failure  None: no call failed
    """

    def __init__(self, function: _Function, compiled: _Function) -> None:
        self.compiled, self._function = compiled, function
        self.name = function.__qualname__.removesuffix(".forward")
        self.failure: str | None = None
        self._was_called = False

    @property
    def agrees(self) -> bool:
        """Whether it was called, and each output was that of the compiled form."""
        return self._was_called and self.failure is None

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """The output of the function itself."""
        expected = self._function(*args, **settings)
        if self.failure is None:
            self._was_called = True
            self.failure = self._compare(expected, partial(self.compiled, *args, **settings))
        return expected

    def _compare(self, expected: Any, run: Callable[[], Any]) -> str | None:
        try:
            actual = run()
        except Exception as error:
            # torch wraps the errors of its compilers.
            return error_line(getattr(error, "inner_exception", error))
        for tensor, other in zip(_tensors(expected), _tensors(actual), strict=True):
            measured, allowed = _error(tensor, other), _ROUNDING_FACTOR * torch.finfo(tensor.dtype).eps
            if not within(f"compiled output of {self.name}, {tensor.dtype}", measured, allowed):
                return f"its output differs by {measured:.2g}, where {allowed:.2g} is rounding"
        return None


def _tensors(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def _error(expected: Tensor, actual: Tensor) -> float:
    """Root-mean-square error relative to the size of the output."""
    exact = expected.double()
    size = exact.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return float((actual - exact).square().mean().sqrt() / size)


def _functions(model: nn.Module) -> Iterator[_Function]:
    """The functions to compile: forwards of modules, and rotations that attention layers call."""
    for module in model.modules():
        if _is_norm(module) or _is_dense_mlp(module):
            yield type(module).forward
        yield from _rotations(type(module).forward).values()


def _install(model: nn.Module, functions: Mapping[_Function, _Function]) -> None:
    """Have the modules of a model call others in place of the functions; by none, the modules' own again."""
    for module in model.modules():
        forward = type(module).forward
        rotations = {
            name: functions[rotation] for name, rotation in _rotations(forward).items() if rotation in functions
        }
        is_compiled = _is_norm(module) or _is_dense_mlp(module)
        if is_compiled or _rotations(forward):
            module.__dict__.pop("forward", None)
        if is_compiled and forward in functions:
            module.__dict__["forward"] = MethodType(functions[forward], module)
        elif rotations:
            module.__dict__["forward"] = MethodType(_with_globals(forward, rotations), module)


def _rotations(function: _Function) -> dict[str, _Function]:
    """The functions of the same file that rotate queries and keys, by the names by which a function calls them."""
    if not isinstance(function, FunctionType):
        return {}
    names = [name for name in function.__code__.co_names if name.startswith(_ROTATION)]
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


def _with_globals(function: _Function, names: Mapping[str, _Function]) -> _Function:
    """The function with other global names, without a change of its file for other models."""
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _is_norm(module: nn.Module) -> bool:
    return "RMSNorm" in type(module).__name__ and not [*module.children()]


def _is_dense_mlp(module: nn.Module) -> bool:
    """Whether a module consists of linear layers and an activation."""
    children = [*module.children()]
    linear = [child for child in children if type(child) is nn.Linear]
    functions = [child for child in children if type(child).__module__ in _ACTIVATIONS]
    parameters = [*module.parameters(recurse=False)]
    return len(linear) > 1 and len(functions) == 1 and len(linear) + 1 == len(children) and not parameters
