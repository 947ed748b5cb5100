"""The messages of a wrong command line: names of other servers are answered with Cellar's."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from cyclopts import CycloptsError, CycloptsPanel, UnknownCommandError, UnknownOptionError, UnusedCliTokensError

from server.configuration.peer_names import command_remedy, option_remedy

if TYPE_CHECKING:
    from rich.panel import Panel


def format_usage_error(error: CycloptsError) -> Panel:
    """The panel of an error."""
    return CycloptsPanel(_explanation(error) or error)


def _explanation(error: CycloptsError) -> str | None:
    """The message for an option or a command of another server; None: that of the library."""
    if isinstance(error, UnknownOptionError):
        flag = (error.token.keyword or error.token.value).partition("=")[0]
        flags = set(chain.from_iterable(argument.names for argument in error.argument_collection))
        remedy = option_remedy(flag, flags)
        return None if remedy is None else f"Unknown option: {flag}. {remedy}"
    if isinstance(error, UnknownCommandError | UnusedCliTokensError) and error.unused_tokens:
        name = error.unused_tokens[0]
        remedy = command_remedy(name)
        return None if remedy is None else f'Unknown command "{name}". Did you mean "{remedy}"?'
    return None
