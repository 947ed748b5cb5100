"""`cellar doctor` on the console: what runs natively, what is missing, and the remedy."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.load.machine.diagnosis import Finding

EXIT_PROBLEM = 1
_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


def run_doctor(model: str | None, *, as_json: bool) -> int:
    """Print the findings; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        with console.status("import of torch"):
            from engine.load.machine.diagnosis import diagnose
            from engine.load.machine.machine import examine
    except ImportError as error:
        console.print(f"cellar: the installation is incomplete ({error}): install cellar again", markup=False)
        return EXIT_PROBLEM
    with console.status("this machine"):
        machine = examine()
        findings = [*diagnose(machine), *_model_findings(model)]
    problems = [finding for finding in findings if finding.level == "problem"]
    if as_json:
        report = {"machine": asdict(machine), "findings": [asdict(finding) for finding in findings]}
        console.print_json(json.dumps(report | {"problems": len(problems)}))
    else:
        for finding in findings:
            console.print(_line(finding), markup=False)
        topics = ", ".join(finding.topic for finding in problems)
        console.print(f"{len(problems)} to mend: {topics}" if problems else "no problem")
    return EXIT_PROBLEM if problems else 0


def _line(finding: Finding) -> str:
    remedy = "" if finding.remedy is None else f"\n{'':20}remedy: {finding.remedy}"
    return f"{_MARKS[finding.level]:<8}{finding.topic:<11} {finding.text}{remedy}"


def _model_findings(model: str | None) -> Iterator[Finding]:
    from engine.errors import ModelError
    from engine.load.machine.diagnosis import Finding
    from engine.load.read.checkpoint import resolve_headers

    try:
        yield Finding("model", "ok", f"{model or 'the bundled model'}: {resolve_headers(model)}")
    except ModelError as error:
        yield Finding("model", "problem", str(error))
