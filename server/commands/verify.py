"""`cellar verify` on the console: a row for each condition, and each difference."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from server.terminal.load_screen import load_screen, print_error

if TYPE_CHECKING:
    from engine.verify.comparison import Comparison
    from engine.verify.verify import ConditionResult, VerifyReport
    from server.configuration.settings import Settings

EXIT_DIFFERENT = 1
# Columns of the console that the table needs.
_TABLE_WIDTH = 120


def run_verify(settings: Settings, json_file: Path | None) -> int:
    """Verify the model and print the report, its phases to stderr; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True, width=max(Console().width, _TABLE_WIDTH))
    screen = load_screen(Console(stderr=True, highlight=False), print_error, "import of torch and transformers")
    from engine.errors import ModelError
    from engine.verify.verify import load_and_verify

    try:
        report = load_and_verify(settings.engine_config(), screen.set_phase)
    except ModelError as error:
        console.print(f"cellar: {error}", markup=False)
        return EXIT_DIFFERENT
    finally:
        screen.stop()
    _print_report(console, report)
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(asdict(report) | {"passed": report.passed}, indent=2), encoding="utf-8")
        except OSError as error:
            console.print(f"cellar: {json_file} cannot be written: {error.strerror}", markup=False)
            return EXIT_DIFFERENT
    return 0 if report.passed else EXIT_DIFFERENT


def _print_report(console: Console, report: VerifyReport) -> None:
    comparison = "log-probabilities bit for bit" if report.bitwise else "tokens; log-probabilities differ by rounding"
    console.print(f"{report.model.name}, {report.model.dtype} on {report.model.device}: {comparison}", markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("condition", "result", "equal", "ties", "largest error", "evidence", "seconds"):
        table.add_column(name, no_wrap=True)
    for condition in report.conditions:
        table.add_row(*_row(condition))
    console.print(table)
    for condition in report.conditions:
        for result in condition.comparisons:
            if result.verdict != "equal":
                console.print(f"{condition.name}: {_sentence(result)}", markup=False)
    console.print("all texts are equal" if report.passed else "a text depends on its condition")


def _row(condition: ConditionResult) -> tuple[str, ...]:
    verdicts = [comparison.verdict for comparison in condition.comparisons]
    result = "DIFFERENT" if not condition.passed else "ok" if condition.exercised else "not exercised"
    error = max((comparison.max_error for comparison in condition.comparisons), default=0.0)
    counts = f"{verdicts.count('equal')} of {len(verdicts)}", str(verdicts.count("tie"))
    figures = f"{error:.1e}" if error else "0", condition.evidence, f"{condition.seconds:.1f}"
    return condition.name, result, *counts, *figures


def _sentence(result: Comparison) -> str:
    """A difference in words."""
    first = result.difference
    if first is None:
        return f"{result.request}: failed: {result.failure}"
    kind = "a tie by rounding" if result.verdict == "tie" else "different"
    gap = "unknown" if first.gap is None else f"{first.gap:.2e}"
    error = "unknown" if first.error is None else f"{first.error:.2e}"
    tokens = f"token {first.actual} in place of {first.expected}" if first.actual != first.expected else "same token"
    return f"{result.request}: {kind} at position {first.position}: {tokens}; gap of the top two {gap}, error {error}"
