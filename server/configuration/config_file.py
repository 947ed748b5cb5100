"""The configuration file: options in TOML, for all commands with options.

Keys at the top are options of `cellar serve` and `model`, named like the flags; a section such as [bench] has the other
options of one command. The command line wins over environment variables, and environment variables over the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import App, ArgumentCollection, Token

from engine.config import EngineConfig
from engine.types.setting import Setting, union_members
from server.configuration.options import Option, options
from server.configuration.peer_names import missing_option, nearest_option
from server.configuration.settings import Settings, is_world_readable
from server.configuration.xdg import config_folder

NAME = "cellar.toml"
_KEYS_OF_API = "api-key"
_CONFIG_FLAG = "--config"
# The sections of models; as a text, the option --models.
_MODELS = "models"


class ConfigFileError(ValueError):
    """The file cannot be read or has a wrong entry; the text names file and key."""


class ConfigFile:
    """Options of a file, for cyclopts: fills the options that neither the command line nor the environment has.

    sections  per command, the class that declares its own options
    """

    def __init__(self, sections: Mapping[str, type]) -> None:
        self.sections = sections

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Add the tokens of the file. Raises ConfigFileError."""
        named = next((argument for argument in arguments if _CONFIG_FLAG in argument.names), None)
        if named is None:
            return
        path = find(named.tokens[0].value if named.tokens else None)
        if path is None:
            return
        table = read(path, self.sections)
        section = table.get(commands[0], {}) if commands else {}
        for argument in filter(lambda argument: argument.parse, arguments):
            for key, value in (*table.items(), *section.items()):
                if not _is_model_table(key, value) and f"--{key}" in argument.names and not argument.has_tokens:
                    for token in _tokens(key, value, path):
                        argument.append(token)


def find(named: str | None) -> Path | None:
    """The named file, else the one in the user's configuration folder; None: there is none."""
    if named:
        return Path(named).expanduser()
    try:
        path = config_folder() / NAME
    except RuntimeError:  # no home folder
        return None
    return path if path.exists() else None


def exposes_keys(path: Path) -> bool:
    """Whether the file has API keys and every user of this machine can read it."""
    return path.is_file() and is_world_readable(path) and _KEYS_OF_API in _normalised(path, _parse(path))


def read(path: Path, sections: Mapping[str, type]) -> dict[str, Any]:
    """The checked entries of a file, keys with hyphens. Raises ConfigFileError."""
    table = _normalised(path, _parse(path))
    top = {key: value for key, value in table.items() if key not in sections and not _is_model_table(key, value)}
    _check(path, "", top, _server_options(), sections)
    for name, kind in sections.items():
        section = table.get(name, {})
        if not isinstance(section, dict):
            raise ConfigFileError(f"{path}: {name} is a section: write [{name}] and its options below")
        table[name] = _normalised(path, section)
        _check(path, f"[{name}] ", table[name], _by_key(options(kind)), ())
    return table


def model_sections(path: Path, defaults: Settings) -> dict[str, Settings]:
    """The settings of the sections [models.NAME], by name: the defaults, changed. Raises ConfigFileError."""
    sections = _parse(path).get(_MODELS, {})
    if not _is_model_table(_MODELS, sections):
        return {}
    types = _model_options()
    fields = {key: option.field for option in options() for key in option.keys}
    models: dict[str, Settings] = {}
    for name, section in sections.items():
        section = _normalised(path, section)
        _check(path, f"[models.{name}] ", section, types, ())
        if ("model" in section) == ("embedding-model" in section):
            raise ConfigFileError(f"{path}: [models.{name}] needs model or embedding-model: a folder, file or hub id")
        values = {
            fields.get(key, key): _value(path, f"[models.{name}] {key}", types[key], key, value)
            for key, value in section.items()
        }
        models[name] = replace(defaults, **{"embedding_model": None, "served_names": (), **values})
    return models


def _model_options() -> dict[str, Any]:
    """The types of the keys of a model's section: options of the engine but its memory, and its names."""
    engine = {field.name for field in fields_of(EngineConfig)} - {"memory", "max_waiting"}
    return {"model": str, **_by_key(option for option in options() if option.field in {*engine, "served_names"})}


def _value(path: Path, place: str, value_type: Any, key: str, value: Any) -> Any:
    """The value of an option, as the command line would read it."""
    setting = next((option for option in options() if key in option.keys), None)
    if setting is None:
        return value
    parse = _parsers().get(setting.field)
    try:
        if parse is not None:
            return parse(str(value))
    except ValueError as error:
        raise ConfigFileError(f"{path}: {place} {error}") from error
    if any(get_origin(part) is tuple for part in union_members(value_type)):
        return (value,) if isinstance(value, str) else tuple(value)
    return value


def _parsers() -> dict[str, Callable[[str], Any]]:
    """The functions that read texts such as 4k, by field."""
    parsers: dict[str, Callable[[str], Any]] = {}
    for name, hint in get_type_hints(EngineConfig, include_extras=True).items():
        for setting in getattr(hint, "__metadata__", ()):
            if isinstance(setting, Setting) and setting.parse is not None:
                parsers[name] = setting.parse
    return parsers


def _is_model_table(key: str, value: Any) -> bool:
    """Whether a key has sections of models."""
    return key == _MODELS and isinstance(value, dict) and all(isinstance(section, dict) for section in value.values())


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigFileError(f"there is no configuration file {path}") from error
    except OSError as error:
        raise ConfigFileError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"{path} is not TOML: {error}") from error


def _normalised(path: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with hyphens in place of underscores. Raises ConfigFileError for a key that is there in both forms."""
    normalised = {key.replace("_", "-"): value for key, value in table.items()}
    twice = [key for key in normalised if key in table and key.replace("-", "_") in table and "-" in key]
    if twice:
        raise ConfigFileError(f"{path}: {twice[0]} is there twice, with hyphens and with underscores")
    return normalised


def _server_options() -> dict[str, Any]:
    """The types of all keys at the top of a file; --config itself is none."""
    known = _by_key(option for option in options() if option.flag != _CONFIG_FLAG)
    return {"model": str, **known}


def _by_key(declared: Iterable[Option]) -> dict[str, Any]:
    return {key: option.value_type for option in declared for key in option.keys}


def _check(path: Path, place: str, table: Mapping[str, Any], types: Mapping[str, Any], sections: Iterable[str]) -> None:
    for key, value in table.items():
        if key not in types and isinstance(value, dict):
            raise ConfigFileError(f"{path}: [{key}] is no section; options of `cellar serve` stand above all sections")
        if key not in types:
            remedy = missing_option(key, types)
            answer = f". {remedy}" if remedy else f"; the nearest one is {nearest_option(key, [*types, *sections])}"
            raise ConfigFileError(f"{path}: {place}{key} is not an option{answer}")
        if not _accepts(value, types[key]):
            raise ConfigFileError(f"{path}: {place}{key} must be {_describe(types[key])}, not {_shown(value)}")


def _accepts(value: Any, value_type: Any) -> bool:
    """Whether a value of TOML has the type of an option."""
    return any(_accepts_one(value, part) for part in union_members(value_type))


def _accepts_one(value: Any, part: Any) -> bool:
    if get_origin(part) is Literal:
        return isinstance(value, str) and value in get_args(part)
    if get_origin(part) in (tuple, list):
        return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    # True is an int in Python.
    return type(value) in {str: (str,), Path: (str,), int: (int,), float: (float, int), bool: (bool,)}.get(part, ())


def _describe(value_type: Any) -> str:
    return " or ".join(_describe_one(part) for part in union_members(value_type) if part is not type(None))


def _describe_one(part: Any) -> str:
    if get_origin(part) is Literal:
        return ", ".join(f'"{word}"' for word in get_args(part))
    if get_origin(part) in (tuple, list):
        return "a text or a list of texts"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(part, "a text")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a section"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


def _tokens(key: str, value: Any, path: Path) -> list[Token]:
    """One token, or one for each item of a list."""
    if isinstance(value, bool):
        return [Token(keyword=key, source=str(path), implicit_value=value)]
    items = value if isinstance(value, list) else [value]
    return [Token(keyword=key, value=str(item), source=str(path), index=index) for index, item in enumerate(items)]
