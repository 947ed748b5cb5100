"""Errors of a chat in the words of another API: its client never sent the fields that they name."""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.errors import EngineError
from server.http.errors import ApiError, from_engine_error


def with_client_field_names(error: ApiError | EngineError, path: str, names: Mapping[str, str]) -> ApiError:
    """The error for a client of `path`.

    names  what the first pattern that matches a whole name becomes, with its groups as in `re.sub`
    """
    told = from_engine_error(error, path) if isinstance(error, EngineError) else error
    if told.param is None:
        return told
    found = (match.expand(new) for old, new in names.items() if (match := re.fullmatch(old, told.param, re.DOTALL)))
    param = next(found, told.param)
    message = told.message.replace(f"'{told.param}'", f"'{param}'")
    return ApiError(told.kind, message, param=param, headers=told.headers, details=told.details)
