"""The devices of the cache."""

from collections.abc import Iterator

import pytest

from tests.conftest import skip_without_gpu
from tests.fake_device import FAKE, fake_device


@pytest.fixture(params=["cpu", pytest.param(FAKE, marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The CPU, a simulated device and a GPU; tests on it are skipped where torch can use none."""
    if request.param == FAKE:
        with fake_device():
            yield FAKE
        return
    if request.param == "cuda":
        skip_without_gpu()
    yield str(request.param)
