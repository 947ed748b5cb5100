"""`cellar pull` and `cellar models` against a hub on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.responses import Response, StreamingResponse

from tests.engine.load.test_hub import Hub
from tests.selection import quick
from tests.server.terminal.session import CTRL_C, ROOT, TerminalSession

NAME = "someone/tiny"
FOLDER = ROOT / "models" / "target"
COMMAND = (sys.executable, "-c", "from server.cli import main; main()")
Home = dict[str, str]


class SlowHub(Hub):
    """A hub whose weights arrive to a third while it is slow."""

    slow = False

    async def file(self, owner: str, name: str, revision: str, file: str) -> Response:
        """One file."""
        answer = await super().file(owner, name, revision, file)
        if not self.slow or file != "model.safetensors":
            return answer
        content = (self.files / file).read_bytes()
        headers = {**answer.headers, "Content-Length": str(len(content))}

        async def pieces() -> AsyncIterator[bytes]:
            yield content[: len(content) // 3]
            while self.slow:
                await asyncio.sleep(0.05)

        return StreamingResponse(pieces(), headers=headers)


@pytest.fixture
def slow_hub() -> SlowHub:
    return SlowHub(FOLDER)


@pytest.fixture
def hub(home: Home, tmp_path: Path, slow_hub: SlowHub) -> Iterator[Home]:
    """Variables for a hub on 127.0.0.1 with the bundled model as someone/tiny, and an empty cache."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(slow_hub.app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield {**home, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "CELLAR_URL": "http://127.0.0.1:9"}
    slow_hub.slow = False
    server.should_exit = True
    thread.join()


def cellar(environment: Home, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def listed(environment: Home) -> list[dict[str, object]]:
    """The cached models in JSON."""
    found: list[dict[str, object]] = json.loads(cellar(environment, "models", "--json")[1])["cached"]
    return found


def test_a_model_is_pulled_listed_and_removed(hub: Home) -> None:
    """The folder and its size on stdout; a second pull downloads nothing."""
    code, shown, _ = cellar(hub, "pull", NAME)
    folder, size = shown.split("  ")
    (model,) = listed(hub)

    assert (0, "5.9 MB\n") == (code, size)
    assert {"config.json", "model.safetensors"} <= {file.name for file in Path(folder).iterdir()}
    assert (NAME, folder, "a" * 40, ["main"], ["safetensors"], 0) == tuple(
        model[name] for name in ("id", "folder", "revision", "names", "formats", "incomplete_bytes")
    )
    assert (0, shown, "") == cellar(hub, "pull", NAME)
    table = cellar(hub, "models")[1]
    assert f"{NAME}" in table
    assert "aaaaaaaa, main" in table
    assert "served: none (no server answers at http://127.0.0.1:9)" in table
    assert (2, "", "cellar: nothing is removed without --yes or a terminal\n") == cellar(hub, "models", "remove", NAME)
    assert [model] == listed(hub)
    assert f"cellar: {NAME} is removed, 5.9 MB are free\n" == cellar(hub, "models", "remove", NAME, "--yes")[2]
    assert [] == listed(hub)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pull", "someone/other"], "the hub has no model of this name"),
        (["pull", NAME, "--revision", "v9"], "the repository has no revision v9"),
        *quick(
            (),
            [
                (["pull", f"{NAME}:Q4_K_M"], "the repository has no such GGUF file; it has model-q4"),
                (["pull", "nothing"], "a name on the hub looks like organisation/model"),
                (["models", "remove", "someone/other", "--yes"], "the cache is empty"),
            ],
        ),
    ],
)
def test_models_that_are_not_there(hub: Home, arguments: list[str], message: str) -> None:
    """One line on stderr, exit code 1."""
    code, shown, messages = cellar(hub, *arguments)

    assert (1, "") == (code, shown)
    assert message in messages
    assert 1 == messages.count("\n")


@pytest.mark.slow
def test_a_removal_is_confirmed_on_a_terminal(hub: Home) -> None:
    """Any other answer than yes keeps the model."""
    cellar(hub, "pull", NAME, "--revision", "v1")
    for answer, code, count in (("", 1, 1), ("y", 0, 0)):
        with TerminalSession(["models", "remove", NAME], hub) as session:
            session.wait(f"Remove {NAME} (1 revisions, up to 5.9 MB)? [y/N] ")
            session.type(f"{answer}\r")
            assert code == session.end()
        assert count == len(listed(hub))


def test_a_pull_on_a_terminal_has_a_bar(hub: Home) -> None:
    with TerminalSession(["pull", NAME], hub) as session:
        assert 0 == session.end()

    assert f"pull {NAME}" in session.text
    assert "5.9 MB" in session.text
    assert session.text.rstrip().endswith("5.9 MB")


def test_ctrl_c_ends_a_download_at_once(hub: Home, slow_hub: SlowHub) -> None:
    """Finished files stay, the cut file is removed, and the same command downloads it."""
    slow_hub.slow = True
    cache = Path(hub["HF_HOME"])
    with TerminalSession(["pull", NAME], hub) as session:
        give_up = time.monotonic() + 60
        while not [*cache.rglob("model.safetensors*.incomplete")] or not [*cache.rglob("tokenizer.json")]:
            assert time.monotonic() < give_up
            time.sleep(0.05)
        session.type(CTRL_C)
        session.wait("cellar: interrupted; the same command continues with the files that are missing")
        assert 130 == session.end()
    slow_hub.slow = False

    assert [] == [*cache.rglob("*.incomplete")]
    assert "5.9 MB" in cellar(hub, "pull", NAME)[1]


def test_models_of_a_running_server_are_listed(url: str, home: Home) -> None:
    environment = {**home, "CELLAR_URL": url, "COLUMNS": "200"}

    assert f"served at {url}: cellar-tiny\n" in cellar(environment, "models")[1]
    assert ["cellar-tiny"] == [
        model["id"] for model in json.loads(cellar(environment, "models", "--json")[1])["served"]
    ]
