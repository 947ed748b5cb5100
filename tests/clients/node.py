"""Programs of npm, in the folder of this environment. Found by PYTHONPATH, as subject.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = Path(sys.prefix) / "node_modules"
SECONDS = 540


def run_program(name: str, *arguments: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A finished program with a home folder of its own, which is its working directory, too."""
    program = MODULES / ".bin" / name
    if not program.exists():
        pytest.skip(f"{name} is not installed: npm was missing")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
    return subprocess.run(
        [str(program), *arguments],
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
