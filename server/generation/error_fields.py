"""Renames fields in errors of a chat request for APIs that were translated to it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.errors import EngineError
from server.http.errors import ApiError, from_engine_error


def with_client_field_names(error: ApiError | EngineError, path: str, names: Mapping[str, str]) -> ApiError:
    """The error for a client of `path`.

    names  patterns of complete field names, and their replacements as in `re.sub`; the first match applies
    """
    api_error = from_engine_error(error, path) if isinstance(error, EngineError) else error
    if api_error.param is None:
        return api_error
    renamed = (
        match.expand(new) for old, new in names.items() if (match := re.fullmatch(old, api_error.param, re.DOTALL))
    )
    param = next(renamed, api_error.param)
    message = api_error.message.replace(f"'{api_error.param}'", f"'{param}'")
    return ApiError(api_error.kind, message, param=param, headers=api_error.headers, details=api_error.details)
