"""Thousands of apps with the same endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from fastapi._compat import v2
from pydantic import TypeAdapter


@pytest.fixture(scope="session", autouse=True)
def shared_type_adapters() -> Iterator[None]:
    """FastAPI's validators of parameters are compiled once a session: they are half of the start-up of an app."""
    adapters: dict[tuple[object, ...], tuple[TypeAdapter[Any], object]] = {}

    def shared(annotation: Any, *, config: Any = None) -> TypeAdapter[Any]:
        parameter_type, *metadata = get_args(annotation)
        key = (parameter_type, repr(metadata), repr(config))
        if key not in adapters:
            # The annotation stays alive, so that addresses in its text are not used again.
            adapters[key] = TypeAdapter(annotation, config=config), annotation
        return adapters[key][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v2, "TypeAdapter", shared)
        yield
