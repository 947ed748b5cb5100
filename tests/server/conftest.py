"""What holds for all tests of the server."""

from __future__ import annotations

from typing import Any

from fastapi.dependencies import utils

_Details = utils.ParamDetails
_analyze_param, _details = utils.analyze_param, dict[tuple[object, ...], _Details]()


def _shared_details(*, param_name: str, annotation: Any, value: Any, path_param_names: set[str]) -> _Details:
    """What FastAPI derives from a parameter of an endpoint: two thirds of the time that an application takes to make.

    Hundreds of tests make applications of their own, whose endpoints have the same parameters.
    """
    key = (param_name, annotation, type(value), value, param_name in path_param_names)
    try:
        details = _details.get(key)
    except TypeError:  # not hashable
        return _analyze_param(
            param_name=param_name, annotation=annotation, value=value, path_param_names=path_param_names
        )
    if details is None:
        details = _details[key] = _analyze_param(
            param_name=param_name, annotation=annotation, value=value, path_param_names=path_param_names
        )
    return details


utils.analyze_param = _shared_details
