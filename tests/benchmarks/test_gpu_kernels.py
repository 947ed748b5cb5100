"""The Triton kernels compile for GPUs that are not there, and fit into their registers and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Of a program, on every GPU of sm_80 and later, and of gfx942.
SHARED_BYTES = {"sm_80": 99 * 1024, "sm_90": 99 * 1024, "gfx942": 64 * 1024}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", SHARED_BYTES)
def test_kernels_fit_into_a_gpu(target: str, tmp_path: Path) -> None:
    """A decoding kernel spills less than 64 bytes a thread, a prompt's less than 192."""
    pytest.importorskip("triton", reason="Triton is installed on Linux for x86-64 only", exc_type=ImportError)
    command = [sys.executable, "-m", "benchmarks.gpu.kernels", "--target", target, "--json", str(tmp_path / "out.json")]
    # The interpreter of the other tests compiles nothing.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)

    rows = json.loads((tmp_path / "out.json").read_text())["rows"]

    assert len(rows) > 60
    assert [] == [row for row in rows if row["shared_bytes"] > SHARED_BYTES[target]]
    assert [] == [row for row in rows if row["spilled_bytes"] >= (192 if row["kernel"] == "prompt" else 64)]
