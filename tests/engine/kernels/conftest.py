"""The attention kernel in each variant that this processor runs."""

from __future__ import annotations

import pytest

from engine.kernels.cpu.attention.attention import NativeAttention
from tests.libraries import built, every_variant


@pytest.fixture(scope="module", params=every_variant("attention"))
def native(request: pytest.FixtureRequest) -> NativeAttention:
    """The kernel of each variant."""
    return NativeAttention(built("attention", request.param))
