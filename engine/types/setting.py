"""What a user has to know of a setting: stands once, as metadata of its type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin


@dataclass(frozen=True, slots=True)
class Setting:
    """Metadata of a field that users may set: `slots: Annotated[int | None, Setting("...")] = None`.

    help          one to three sentences
    default_text  the default in words; "": the value itself
    older_name    a former name of the field, which stays valid
    parse         from a text such as 4k to a value; raises ValueError; None: the text of a plain value
    """

    help: str
    default_text: str = ""
    older_name: str = ""
    parse: Callable[[str], object] | None = None


def union_members(value_type: Any) -> tuple[Any, ...]:
    """The types of a union; any other type alone."""
    return get_args(value_type) if get_origin(value_type) in (Union, UnionType) else (value_type,)


def literal_words(value_type: Any) -> tuple[str, ...]:
    """The words of all Literals in a type."""
    return tuple(word for part in union_members(value_type) if get_origin(part) is Literal for word in get_args(part))
