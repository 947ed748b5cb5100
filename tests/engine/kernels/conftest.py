"""The attention kernel, as each set of instructions that this processor has."""

from __future__ import annotations

import pytest

from engine.kernels.cpu import build
from engine.kernels.cpu.native import Native


@pytest.fixture(scope="module", params=build.variants("attention"))
def native(request: pytest.FixtureRequest) -> Native:
    """The kernel of each variant."""
    try:
        return Native(build.library("attention", request.param))
    except build.NoLibrary as error:
        pytest.skip(error.reason)
