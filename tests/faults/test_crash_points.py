"""A crash or an error at every call that changes a file: no acknowledged step is lost, and the store still works."""

from __future__ import annotations

import shutil

import pytest

from tests.faults import crash_points
from tests.faults.scenarios import SCENARIOS

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")


def test_a_store_of_kernels_survives_a_crash_at_every_call() -> None:
    counts = crash_points.run(["kernels"], ["kill"])

    assert [] == [count for count in counts if count.failures]
    assert all(count.points > 10 for count in counts)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_fault_at_every_call(name: str) -> None:
    counts = crash_points.run([name])

    assert [] == [count for count in counts if count.failures]
    assert all(count.points > 10 for count in counts)
