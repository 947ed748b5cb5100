"""The image as a pod of deploy/kubernetes/cellar.yaml, limited to one processor, with a model that is quantised."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.container.pod import Pod, pod_template, quantity, running_pod
from tests.container.streams import Streams

pytestmark = [pytest.mark.container, pytest.mark.timeout(900, func_only=True)]

KEY = "sk-pod"
STREAMS = 32
# 70 MB in 8 bits: smaller models are not stored.
SHAPE = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
VARIABLES = {"CELLAR_MODEL": "/models/random", "CELLAR_QUANTIZE": "int8", "CELLAR_SERVED_MODEL_NAME": "random"}
CHAT = {"model": "random", "messages": [{"role": "user", "content": "abcd"}], "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def volumes(image: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the model and the Secret."""
    from benchmarks.shapes import write_folder  # transformers is imported where the image is tested only

    folder = tmp_path_factory.mktemp("pod")
    (folder / "models").mkdir()
    write_folder(SHAPE, folder / "models/random")
    (folder / "secret").mkdir()
    (folder / "secret/api-keys").write_text(KEY + "\n")
    return folder


@pytest.fixture(scope="module")
def pod(volumes: Path) -> Iterator[Pod]:
    """The first start of the model."""
    with running_pod(volumes, VARIABLES, cpu="1") as pod:
        yield pod


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The file of the quantised weights: its number, and the time of its last use in nanoseconds."""

    inode: int
    used: int


def stored_weights(volumes: Path) -> StoredWeights:
    """Exactly one file is stored."""
    [file] = (volumes / "models/cache/kvcellar/weights").glob("int8-*.safetensors")
    return StoredWeights(file.stat().st_ino, file.stat().st_mtime_ns)


def test_probes_succeed_by_ip_without_a_key(pod: Pod) -> None:
    assert [200, 200] == [pod.probe(name) for name in ("readinessProbe", "livenessProbe")]
    assert 200 == pod.probed["startupProbe"][-1]


def test_requests_by_ip_need_the_key_of_the_secret(pod: Pod) -> None:
    body = {**CHAT, "max_tokens": 4}
    answers = [
        httpx.post(f"{pod.url}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False)
        for headers in ({}, {"Authorization": f"Bearer {KEY}"})
    ]

    assert [401, 200] == [answer.status_code for answer in answers]
    assert 4 == answers[1].json()["usage"]["completion_tokens"]


def test_only_the_volumes_can_be_written(pod: Pod) -> None:
    """The root file system and the Secret are read-only."""
    mounts = [line.split() for line in Path(f"/proc/{pod.server.pid}/mounts").read_text().splitlines()]
    writable = {place for _, place, kind, options, *_ in mounts if "rw" in options.split(",") and kind != "proc"}

    assert {"/tmp", "/models"} == {place for place in writable if not place.startswith(("/dev", "/sys"))}


@pytest.mark.parametrize(
    ("key", "value"),
    [("Uid", ["10001"] * 4), ("Groups", ["10001"]), ("NoNewPrivs", ["1"]), ("Seccomp", ["2"]), ("CapBnd", ["0" * 16])],
)
def test_the_server_is_restricted(pod: Pod, key: str, value: list[str]) -> None:
    """By the kernel: Seccomp 2 is a filter."""
    lines = Path(f"/proc/{pod.server.pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)

    assert value == status[key].split()


def test_limits_of_the_pod_are_the_machine_of_the_server(pod: Pod) -> None:
    code = "from engine.load.machine import resources as r; print(r.processor_count(), r.memory_limit_bytes())"
    processors, memory = pod.execute("/opt/cellar/bin/python", "-c", code).split()

    assert 1 == int(processors)
    assert int(quantity(pod_template()["containers"][0]["resources"]["limits"]["memory"])) == int(memory)
    planned = re.search(r"of ([\d.]+) GiB free", pod.log.read_text())
    assert planned is not None
    assert float(planned[1]) < 4


def test_one_thread_computes_while_32_streams_are_served(pod: Pod) -> None:
    """A second one would be throttled with the first. Probes succeed in time."""
    before = {thread.id: thread.user_time for thread in pod.server.threads()}
    streams = Streams(pod.url, STREAMS, {**CHAT, "max_tokens": 64}, KEY)
    streams.wait_until_started(8)
    probed = [pod.probe(name) for name in ("readinessProbe", "livenessProbe") * 3]
    ended = streams.results()
    times = sorted(thread.user_time - before.get(thread.id, 0) for thread in pod.server.threads())

    assert [200] * 6 == probed
    assert [("length", True)] * STREAMS == [(stream.finish, stream.done) for stream in ended]
    assert times[-2] < times[-1] / 2


def test_streams_that_outlast_the_grace_period_end_with_an_error(pod: Pod) -> None:
    """The pod ends by itself in time; while requests drain it is alive, but not ready. Ends the pod."""
    pod.probed.clear()
    streams = Streams(pod.url, STREAMS, {**CHAT, "max_tokens": 3900}, KEY)
    streams.wait_until_started(8)

    def probe() -> None:
        pod.probe("readinessProbe")
        pod.probe("livenessProbe")

    status, seconds = pod.stop(probe)

    ended = streams.results()
    assert 0 == status
    assert seconds < pod.manifest["terminationGracePeriodSeconds"]
    unfinished = [stream for stream in ended if not stream.finish]
    assert unfinished
    assert all(stream.error and not stream.cut for stream in unfinished), unfinished
    ready, alive = ([status for status in pod.probed[name] if status] for name in ("readinessProbe", "livenessProbe"))
    assert {503} == {*ready}
    assert {200} == {*alive}


@pytest.mark.usefixtures("pod")
def test_the_second_start_finds_the_quantised_weights(volumes: Path) -> None:
    """As after a crash: the volumes of the pod are still there."""
    first = stored_weights(volumes)

    with running_pod(volumes, VARIABLES, cpu="1") as pod:
        second = stored_weights(volumes)
        assert 0 == pod.stop()[0]

    assert first.inode == second.inode
    assert first.used < second.used
    assert "is not read" not in pod.log.read_text()
