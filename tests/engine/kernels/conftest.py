"""The attention kernel in each variant that this processor runs."""

from __future__ import annotations

import pytest

from engine.kernels.cpu import build
from engine.kernels.cpu.attention import NativeAttention
from tests.libraries import built


@pytest.fixture(scope="module", params=build.variants("attention"))
def native(request: pytest.FixtureRequest) -> NativeAttention:
    """The kernel of each variant."""
    return NativeAttention(built("attention", request.param))
