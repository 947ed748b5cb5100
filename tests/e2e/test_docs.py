"""The commands of README and docs: requests are sent to a server, options of other commands are parsed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.cli import make_app
from tests.e2e.serving import ROOT, serving

ADDRESS = "http://127.0.0.1:8000"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_block = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Packages of these clients are in environments of their own (make test-clients).
ELSEWHERE = ("langchain",)


def blocks(language: str) -> list[tuple[str, str]]:
    """Page and text of each block of code."""
    return [
        (page.relative_to(ROOT).as_posix(), text)
        for page in PAGES
        for kind, text in _block.findall(page.read_text())
        if kind == language
    ]


REQUESTS = [(page, text) for page, text in blocks("") if text.startswith("curl ")]
PROGRAMS = [(page, text) for page, text in blocks("python") if not any(name in text for name in ELSEWHERE)]
COMMANDS = [
    (page, command)
    for page, text in blocks("")
    for line in text.replace("\\\n", " ").splitlines()
    if (command := re.sub(r"^(.* \| )?(\.venv/bin/)?(?=cellar )", "", line.split(" > ")[0])).startswith("cellar ")
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tempfile.TemporaryFile("w") as errors, serving(["--store", "memory", "--threads", "1"], errors) as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), REQUESTS)
def test_requests_are_answered(url: str, page: str, text: str) -> None:
    """The shell runs them as they are, but for the port."""
    sent = text.replace(ADDRESS, url)
    assert url in sent
    done = subprocess.run(["bash", "-ec", sent], capture_output=True, text=True, timeout=60, check=True)

    answer = done.stdout.removeprefix("data: ").splitlines()[0]
    assert {"choices", "message"} & json.loads(answer).keys(), answer


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), PROGRAMS)
def test_programs_run(url: str, tmp_path: Path, page: str, text: str) -> None:
    """In a folder with the file that one of them reads."""
    request = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    (tmp_path / "requests.jsonl").write_text(json.dumps({**request, "body": body}) + "\n")
    sent = text.replace(ADDRESS, url)
    command = [sys.executable, "-c", sent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)

    assert 0 == done.returncode, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_options_exist(page: str, command: str) -> None:
    """The command line accepts them; nothing is run."""
    words = shlex.split(command)[1:]

    make_app().parse_args(words, exit_on_error=False, print_error=False)


def test_there_are_commands() -> None:
    """The patterns above find them."""
    assert len(REQUESTS) >= 6
    assert len(PROGRAMS) >= 2
    assert len(COMMANDS) >= 25
