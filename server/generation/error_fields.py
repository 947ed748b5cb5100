"""Renames fields in errors of a chat request for APIs that were translated to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from engine.errors import EngineError
from server.http.errors import ApiError, from_engine_error


def with_client_field_names(error: ApiError | EngineError, path: str, names: Mapping[str, str]) -> ApiError:
    """The error for a client of `path`.

    names  patterns of complete field names, and their replacements as in `re.sub`; the first match applies
    """
    api_error = from_engine_error(error, path) if isinstance(error, EngineError) else error
    if api_error.param is None:
        return api_error
    param = _client_name(api_error.param, names)
    message = api_error.message.replace(f"'{api_error.param}'", f"'{param}'")
    return ApiError(api_error.kind, message, param=param, headers=api_error.headers, details=api_error.details)


def warnings_with_client_field_names(warnings: Iterable[str], names: Mapping[str, str]) -> tuple[str, ...]:
    """The warnings, each with the client's name of the field that it names first."""
    return tuple(
        re.sub("'([^']*)'", lambda match: f"'{_client_name(match[1], names)}'", warning, count=1)
        for warning in warnings
    )


def _client_name(field: str, names: Mapping[str, str]) -> str:
    renamed = (match.expand(new) for old, new in names.items() if (match := re.fullmatch(old, field, re.DOTALL)))
    return next(renamed, field)
