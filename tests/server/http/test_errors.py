"""The error table: every code is documented, and only server/http/errors.py has status codes."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from engine import errors as engine_errors
from server.http import errors
from server.http.errors import ApiError, ErrorKind

ROOT = Path(__file__).parents[3]
KINDS = [value for value in vars(errors).values() if isinstance(value, ErrorKind)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_every_code_is_a_row_of_the_page(kind: ErrorKind) -> None:
    """docs/errors.md has status, code and type of each."""
    page = (ROOT / "docs" / "errors.md").read_text()

    assert f"| {kind.status} | `{kind.code}` | `{kind.type}` |" in page


def test_the_page_has_no_other_rows() -> None:
    """Removed codes are removed from the page."""
    page = (ROOT / "docs" / "errors.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and line[2].isdigit()]

    assert {kind.code for kind in KINDS} == {row.split("`")[1] for row in rows}
    assert len(KINDS) == len(rows)


def test_codes_are_unique() -> None:
    assert len(KINDS) == len({kind.code for kind in KINDS})


@pytest.mark.parametrize(
    "error",
    [
        engine_errors.InvalidRequest("seed", "no"),
        engine_errors.ContextTooLong(10, 5),
        engine_errors.Loading("x"),
        engine_errors.Overloaded(1, 1.0),
        engine_errors.TimeoutTooShort(1.0, 2.0),
        engine_errors.Draining(),
        engine_errors.EngineDead("x"),
        engine_errors.SequenceFailed("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_engine_error_has_an_api_error(error: engine_errors.EngineError) -> None:
    """No engine error is an unexplained 500, and retryable ones have Retry-After."""
    answer = errors.from_engine_error(error, "/v1/chat/completions")

    assert isinstance(answer, ApiError)
    assert answer.kind is not errors.INTERNAL_ERROR
    assert isinstance(error, engine_errors.Unavailable) == ("Retry-After" in (answer.headers or {}))


@pytest.mark.parametrize(
    ("tokens", "longest", "named"), [(10, 0, False), (10, 5, False), (10, 10, False), (10, 11, True), (5, 32768, True)]
)
def test_a_prompt_for_a_larger_context_names_the_option(tokens: int, longest: int, named: bool) -> None:
    """Not if the model or the memory allows no larger context."""
    error = engine_errors.ContextTooLong(tokens, 5, max_context=longest)
    message = errors.from_engine_error(error, "/v1/chat/completions").message

    assert named == message.endswith(f"Started with a larger --context, this server holds up to {longest} tokens.")
    assert named == ("--context" in message)


def test_no_deterministic_failure_is_a_5xx() -> None:
    """Clients retry every 5xx, so only temporary or unexpected errors have one."""
    passing = {"model_loading", "server_draining", "engine_dead", "store_unavailable", "disk_full", "adapters_full"}
    passing |= {"hub_unreachable", "too_many_connections", "threads_exhausted", "model_failed", "load_timeout"}

    assert {"internal_error", "generation_failed", *passing} == {kind.code for kind in KINDS if kind.status >= 500}


def status_codes(source: str) -> list[int]:
    """The status codes of a module that are written in decimal."""
    constants = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    numbers = [node for node in constants if type(node.value) is int and 400 <= node.value < 512]
    return [node.value for node in numbers if (ast.get_source_segment(source, node) or "").isdigit()]  # type: ignore[misc]


def test_only_one_file_has_status_codes() -> None:
    """No other file of server/ contains such a number; the modes of files and folders are octal."""
    found = [
        (path.name, number)
        for path in (ROOT / "server").rglob("*.py")
        if path.name != "errors.py"
        for number in status_codes(path.read_text())
        # OpenAI's limit of questions in a decision, and the port of https.
        if (path.name, number) not in (("decisions.py", 400), ("addresses.py", 443))
    ]

    assert [] == found


def test_error_kinds_are_sorted_by_status() -> None:
    """The table reads from 400 to 507."""
    statuses = [kind.status for kind in KINDS]

    assert sorted(statuses) == statuses
    assert inspect.getdoc(errors) is not None


def test_an_error_of_the_engine_names_the_field_of_the_client() -> None:
    error = errors.from_engine_error(
        engine_errors.InvalidRequest("score_from", "cannot be scored"), "/v1/chat/completions"
    )

    assert error.param == "prompt_logprobs"
    assert "'prompt_logprobs'" in error.message


def test_the_delay_of_a_load_is_told_exactly() -> None:
    error = errors.from_engine_error(
        engine_errors.LoadDelayed("the model ended several times", 419.2), "/v1/chat/completions"
    )

    assert (error.status_code, error.headers) == (503, {"Retry-After": "420"})
