"""Errors of the engine between processes: the name of the class and its arguments, never an object."""

from __future__ import annotations

import inspect

import msgspec

from engine import errors
from engine.errors import EngineError

# Names of the constructor's parameters, by class. An exception without a constructor has its text.
_PARAMETERS = {
    kind: tuple(inspect.signature(kind.__init__).parameters)[1:] if "__init__" in kind.__dict__ else None
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, EngineError)
}
_KINDS = {kind.__name__: kind for kind in _PARAMETERS}


class ErrorMessage(msgspec.Struct, frozen=True, array_like=True):
    """An error: the name of its class, and its fields by the names of the constructor's parameters.

    Fields are texts, numbers, booleans, and the [kind, fields] of a nested error.
    """

    kind: str
    fields: dict[str, object]


class UnknownError(ValueError):
    """An ErrorMessage that no class of engine/errors.py matches."""


def to_message(error: EngineError) -> ErrorMessage:
    """The message of an error; a class of another module crosses as its base class in engine/errors.py."""
    kind = next(base for base in type(error).__mro__ if base in _KINDS.values())
    return ErrorMessage(kind.__name__, {name: _field(error, name) for name in _parameters(kind)})


def to_error(message: ErrorMessage) -> EngineError:
    """The error of a message. Raises UnknownError."""
    kind = _KINDS.get(message.kind)
    if kind is None or {*message.fields} != {*_parameters(kind)}:
        raise UnknownError(f"no error {message.kind} has the fields {sorted(message.fields)}")
    values = {name: _nested(value) for name, value in message.fields.items()}
    if _is_text_only(kind):
        return kind(*values.values())
    return kind(**values)


def _parameters(kind: type[EngineError]) -> tuple[str, ...]:
    """Those of the nearest constructor; "message" for the constructor of Exception."""
    for base in kind.__mro__:
        if (names := _PARAMETERS.get(base)) is not None:
            return names
    return ("message",)


def _is_text_only(kind: type[EngineError]) -> bool:
    return all(_PARAMETERS.get(base) is None for base in kind.__mro__)


def _field(error: EngineError, name: str) -> object:
    value = str(error) if name == "message" else getattr(error, name)
    return to_message(value) if isinstance(value, EngineError) else value


def _nested(value: object) -> object:
    return to_error(msgspec.convert(value, ErrorMessage)) if isinstance(value, list) else value
