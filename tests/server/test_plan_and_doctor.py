"""`cellar plan` and `cellar doctor` as commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.load.read.checkpoint import resolve
from server.cli import make_app
from tests.house.source import ROOT


@dataclass(frozen=True, slots=True)
class Done:
    """A finished command."""

    returncode: int | str | None
    stdout: str
    stderr: str


Cellar = Callable[..., Done]


@pytest.fixture
def cellar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cellar:
    """Runs a command in this process: a process of its own imports torch and transformers anew."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            make_app()(arguments)
        return Done(ended.value.code, *capsys.readouterr())

    return run


def process(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A finished process, with a cache folder of its own and an unreachable hub."""
    own = {"XDG_CACHE_HOME": str(folder), "HF_ENDPOINT": "http://127.0.0.1:9", "COLUMNS": "200"}
    command = [sys.executable, "-c", "from server.cli import main; main()", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **own}, timeout=200, check=False
    )


def test_plan_of_the_bundled_model(cellar: Cellar) -> None:
    done = cellar("plan", "--json", "--context", "2048", "--slots", "2")
    plan: dict[str, Any] = json.loads(done.stdout)
    memory = plan["memory"]

    assert 0 == done.returncode, done.stderr
    assert ("LlamaForCausalLM", 2048, 2) == (plan["architecture"], plan["context"], plan["slots"])
    assert memory["cache_bytes"] == 2 * 2048 * sum(group["token_bytes"] for group in plan["groups"])
    own = sum(memory[name] for name in ("weights_bytes", "cache_bytes", "workspace_bytes"))
    assert plan["total_bytes"] == plan["process_bytes"] + own
    assert {(1, 4096), (8, 4096)} <= {(entry["slots"], entry["context"]) for entry in plan["table"]}


def test_plan_as_text(cellar: Cellar) -> None:
    done = cellar("plan", "--kv-dtype", "int8", "--draft-model", str(resolve(None)))

    assert 0 == done.returncode, done.stderr
    for words in (
        "weights    11.0 MiB (float32)",
        "a token (int8): 4 layers x 2 heads x (64 + 64)",
        "1 slot",
        "total",
        " more for ",
    ):
        assert words in done.stdout


def test_plan_that_does_not_fit(cellar: Cellar) -> None:
    done = cellar("plan", "--slots", "100000", "--context", "4096")

    assert 1 == done.returncode
    assert "lower --context (4096) or --slots (100000)" in done.stdout


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_missing_model_is_one_line(command: str, cellar: Cellar) -> None:
    done = cellar(command, "./no-such-folder")

    assert 1 == done.returncode
    assert "there is no such folder" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_doctor_ends_with_the_topics_to_mend(cellar: Cellar) -> None:
    lines = cellar("doctor", "./no-such-folder").stdout.splitlines()

    assert " to mend: " in lines[-1]
    assert lines[-1].endswith("model")


@pytest.mark.slow
def test_doctor_reports_this_machine(tmp_path: Path) -> None:
    done = process("doctor", "--json", folder=tmp_path)
    report: dict[str, Any] = json.loads(done.stdout)
    levels = {finding["topic"]: finding["level"] for finding in report["findings"]}

    assert {"system", "packages", "kernels", "compiler", "memory", "cache", "hub", "model"} <= levels.keys()
    assert ("ok", "note") == (levels["model"], levels["hub"])
    assert report["problems"] == list(levels.values()).count("problem")
    assert done.returncode == (1 if report["problems"] else 0)
