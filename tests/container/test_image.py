"""The image, built with buildah and served by crun under the limits of compose.yaml, by the scripts that users have."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.container.dockerfile import ROOT
from tests.container.pod import SCRIPT
from tests.container.streams import Streams

# The service has one slot for each stream.
STREAMS = 32
SERVICE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["cellar"]

# Without the build, which takes an hour on a busy machine and has a limit of its own.
pytestmark = [pytest.mark.container, pytest.mark.timeout(300, func_only=True)]


@dataclass(frozen=True, slots=True)
class Container:
    """A running server: the process that started it, the server's own process, and its address on this machine."""

    runner: subprocess.Popen[bytes]
    server: psutil.Process
    port: int
    log: Path

    def status(self, key: str) -> str:
        """Return a line of the server's /proc status."""
        lines = Path(f"/proc/{self.server.pid}/status").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{key}:"))

    def limit(self, controller: str, first: str, second: str) -> str:
        """A limit of the server's cgroup, from the file of version 1 or 2."""
        for line in Path(f"/proc/{self.server.pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            folder = Path(SCRIPT.CGROUPS, controllers, path.lstrip("/"))
            for name in (first, second):
                file = folder / f"{controller}.{name}"
                if controllers in ("", controller) and file.exists():
                    return file.read_text().strip()
        raise AssertionError(f"{controller} is not limited")

    def run(self, *command: str, port: int) -> int:
        """Run a command on the container's own files, and return its exit status."""
        enter = ["nsenter", "--mount", f"--target={self.server.pid}", "env", f"CELLAR_PORT={port}"]
        return subprocess.run([*enter, *command], check=False, capture_output=True).returncode


@pytest.fixture(scope="module")
def container(image: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """The service of compose.yaml, ready, on a free port; ended after the last test if none has ended it."""
    log = tmp_path_factory.mktemp("container") / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CELLAR_", "HF_"))}
    environment |= {"CELLAR_PORT": str(port), "CELLAR_SHELF": "/shelf", "CELLAR_STORE": "/shelf/responses.sqlite"}
    environment |= {"CELLAR_SLOTS": str(STREAMS), "CELLAR_CONTEXT": "1024"}
    if "CELLAR_IMAGES" in os.environ:
        environment["CELLAR_IMAGES"] = os.environ["CELLAR_IMAGES"]
    with log.open("wb") as out:
        command = [sys.executable, str(ROOT / "docker/run-without-docker.py")]
        runner = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_until_ready(runner, port, log)
        yield Container(runner, server_process(runner), port, log)
    finally:
        runner.terminate()
        runner.wait(timeout=60)


def wait_until_ready(runner: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return once /ready answers 200; fail with the log if the container ends first or takes three minutes."""
    give_up = time.monotonic() + 180
    while time.monotonic() < give_up and runner.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    pytest.fail(f"the container did not get ready:\n{log.read_text()}")


def server_process(runner: subprocess.Popen[bytes]) -> psutil.Process:
    """Return the process in the container: the one below the runner that has a process namespace of its own."""
    below = psutil.Process(runner.pid).children(recursive=True)
    outside = os.readlink("/proc/self/ns/pid")
    return next(process for process in below if os.readlink(f"/proc/{process.pid}/ns/pid") != outside)


def test_it_answers_a_chat(container: Container) -> None:
    """The bundled model answers over HTTP with no model, key or network given."""
    answer = httpx.post(
        f"http://127.0.0.1:{container.port}/v1/chat/completions",
        json={"model": "cellar-tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
        timeout=60,
        trust_env=False,
    )

    assert 200 == answer.status_code
    assert answer.json()["choices"][0]["message"]["content"]


def test_responses_lie_in_the_volume(container: Container) -> None:
    """Where the settings name a place in the volume, a response is written there and can be fetched."""
    url = f"http://127.0.0.1:{container.port}/v1/responses"
    asked = {"model": "cellar-tiny", "input": "Hello", "max_output_tokens": 4}
    made = httpx.post(url, json=asked, timeout=60, trust_env=False).json()

    assert made == httpx.get(f"{url}/{made['id']}", trust_env=False).json()
    seen = Path("/proc", str(container.server.pid), "root")
    assert (seen / "shelf/responses.sqlite").stat().st_size


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:8000", 200), ("127.0.0.1:8000", 200), ("cellar:8000", 200), ("evil.test", 421)]
)
def test_it_answers_for_the_names_of_compose(container: Container, host: str, status: int) -> None:
    """This machine and the other services of the compose file are answered, a rebound name is not."""
    url = f"http://127.0.0.1:{container.port}/v1/models"

    assert status == httpx.get(url, headers={"Host": host}, trust_env=False).status_code


@pytest.mark.parametrize(
    ("key", "value"),
    [("Uid", "10001\t10001\t10001\t10001"), ("NoNewPrivs", "1"), ("CapEff", "0" * 16), ("CapBnd", "0" * 16)],
)
def test_it_has_no_privilege(container: Container, key: str, value: str) -> None:
    """The kernel itself says that the server is not root, has no capability and can gain none."""
    assert value == container.status(key)


def test_only_the_volumes_and_tmp_can_be_written(container: Container) -> None:
    """The root file system is read-only in the container."""
    mounts = [line.split() for line in Path(f"/proc/{container.server.pid}/mounts").read_text().splitlines()]
    writable = {place for _, place, _, options, *_ in mounts if "rw" in options.split(",")}

    assert "/" not in writable
    assert {"/tmp", "/models", "/shelf"} <= writable


def test_the_health_check_fails_while_not_ready(container: Container) -> None:
    """The probe, run on the files of the image, passes while the server is ready and fails where none is."""
    probe = ("/opt/cellar/bin/python", "/opt/cellar/healthcheck.py")

    assert 0 == container.run(*probe, port=container.port)
    assert 1 == container.run(*probe, port=1)


def test_the_settings_of_pip_are_not_in_the_image(container: Container) -> None:
    """The settings of pip reach the build as a secret; neither they nor the folders that they name leave a trace."""
    root = Path(f"/proc/{container.server.pid}/root")

    assert not (root / "etc/pip.conf").exists()
    assert not (root / "source").exists()
    assert ["cellar"] == [place.name for place in (root / "opt").iterdir()]


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_by_ip_are_answered(container: Container, path: str) -> None:
    """Load balancers and Prometheus address a container by its IP."""
    url, headers = f"http://127.0.0.1:{container.port}{path}", {"Host": "172.18.0.2:8000"}

    assert 200 == httpx.get(url, headers=headers, trust_env=False).status_code


@pytest.mark.skipif(not SCRIPT.has_cgroups(), reason="cgroups cannot be made on this machine")
def test_memory_and_processes_are_limited(container: Container) -> None:
    assert SCRIPT.size(SERVICE["mem_limit"]) == int(container.limit("memory", "limit_in_bytes", "max"))
    assert SERVICE["pids_limit"] == int(container.limit("pids", "max", "max"))


def test_32_streams_end_well_after_sigterm(container: Container) -> None:
    """As of `docker stop`: running answers are completed, new requests refused, and the server ends by itself before
    Docker would kill it, with exit status 0. Runs last: it ends the container of this file.
    """
    url = f"http://127.0.0.1:{container.port}"
    chat = {"model": "cellar-tiny", "messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
    streams = Streams(url, STREAMS, {**chat, "max_tokens": 96})
    streams.wait_until_started(STREAMS)
    running = sum(not stream.done for stream in streams.streams)
    container.runner.terminate()
    refused = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=30, trust_env=False)

    status = container.runner.wait(timeout=float(SERVICE["stop_grace_period"].removesuffix("s")))
    ended = streams.results()

    assert 0 == status
    assert 503 == refused.status_code
    assert running > STREAMS / 2
    assert [("length", True, False)] * STREAMS == [(stream.finish, stream.done, stream.cut) for stream in ended]
