"""`cellar verify` as a command, on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.cli import make_app


def test_report_of_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    with pytest.raises(SystemExit) as ended:
        make_app()(["verify", "--context", "1024", "--slots", "4", "--threads", "1", "--json", str(file)])
    printed, report = capsys.readouterr(), json.loads(file.read_text())
    output = printed.out

    assert 0 == ended.value.code, output
    assert "all texts are equal" in output
    assert report["passed"]
    assert "cellar: batch in small chunks\n" in printed.err
    assert {"drafts: lookup", "drafts: model", "few cells"} <= {entry["name"] for entry in report["conditions"]}
