"""schemathesis: requests made from our OpenAPI document, good and bad ones; every answer is one that it declares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from subject import Server

CASES = 10_000
# Of each operation, beside what the boundaries of its schema give.
EXAMPLES = 50
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
SLOWEST_SECONDS = 300

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def report(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one run found."""
    folder = tmp_path_factory.mktemp("fuzz")
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json"]
    command += ["--checks", CHECKS, "--header", f"Authorization: Bearer {server.key}"]
    command += ["--seed", "1", "--max-examples", str(EXAMPLES), "--continue-on-failure", "--no-shrink"]
    # One worker: so that a seed is a run, and since two of them in Python 3.11 trip over each other in `ast`.
    command += ["--workers", "1", "--suppress-health-check", "all", "--request-timeout", str(SLOWEST_SECONDS)]
    command += ["--report", "json", "--report-json-path", "report.json", "--no-color"]
    hooks = {**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        command, cwd=folder, env=hooks, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(done.stdout[-20_000:])
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def test_answers_as_declared(report: dict[str, Any]) -> None:
    """No 5xx, and no status, content type or body that is not in the document."""
    assert CASES <= report["test_cases"]["generated"]
    assert ([], []) == (report["failures"], report["errors"])


def test_all_operations(report: dict[str, Any]) -> None:
    """Nothing was left out, and the run went to its end."""
    operations = report["operations"]

    assert operations["total"] == operations["tested"] > 30
    assert report["complete"]
