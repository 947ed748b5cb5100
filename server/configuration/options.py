"""The declared options of a class such as Settings: names, types and help texts, for all places that list them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import Parameter

from engine.types.setting import literal_words, union_members
from server.configuration.settings import ENVIRONMENT_PREFIX, INTERNAL, Settings

# Settings that belong to one server.
_OWN = ("host", "port", "keys", "key_file", "config")


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command.

    flags         the current name first, then its aliases
    value_type    of the field: int, str | None, tuple[str, ...], a Literal, ...; with str where a text such as 4k is
                  converted to it
    choices       the accepted words, if there are only few values
    default_text  the default in words
    """

    field: str
    flags: tuple[str, ...]
    value_type: Any
    choices: tuple[str, ...]
    help: str
    default: object
    default_text: str

    @property
    def flag(self) -> str:
        """The current name."""
        return self.flags[0]

    @property
    def keys(self) -> tuple[str, ...]:
        """The names in a configuration file."""
        return tuple(flag[2:] for flag in self.flags)

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables of all names."""
        return tuple(ENVIRONMENT_PREFIX + key.replace("-", "_").upper() for key in self.keys)


def options(kind: type = Settings) -> list[Option]:
    """The options that a class declares, in the order of its fields; by default all options of `cellar serve`."""
    hints = get_type_hints(kind, include_extras=True)
    declared = [_option(field, hints[field.name]) for field in fields(kind)]
    return [option for option in declared if option is not None]


def serve_arguments(settings: Settings) -> Iterator[str]:
    """The command line of another `cellar serve` with these settings, without address, API keys and file."""
    for option in options():
        value = getattr(settings, option.field)
        if option.field in _OWN or value == option.default:
            continue
        for item in value if isinstance(value, tuple) else [value]:
            yield from [option.flag] if item is True else [option.flag, str(item)]


def serve_environment(keys: Sequence[str]) -> dict[str, str]:
    """Variables for another `cellar serve`: its API keys, and no other option from the environment or a file."""
    # An empty variable counts as not set.
    unset = {variable: "" for option in options() for variable in option.variables if variable in os.environ}
    return {**unset, "CELLAR_MODEL": "", "CELLAR_CONFIG": os.devnull, "CELLAR_API_KEY": ",".join(keys)}


def _option(declared: Field[Any], hint: Any) -> Option | None:
    """None for a field that is not an option."""
    value_type, parameter = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, Parameter())
    if parameter == INTERNAL:
        return None
    names = parameter.name or (f"--{declared.name.replace('_', '-')}",)
    return Option(
        field=declared.name,
        flags=(*names, *(parameter.alias or ())),
        value_type=value_type | str if parameter.converter and int in union_members(value_type) else value_type,
        choices=literal_words(value_type),
        help=parameter.help or "",
        default=declared.default,
        default_text=str(parameter.show_default or declared.default),
    )
