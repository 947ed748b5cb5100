"""The processes of the profile `replicas` of compose.yaml with its commands and environment, without Docker."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.launch import CELLAR, started
from tests.e2e.serving import ROOT
from tests.server import postgres

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not postgres.installed(), reason="needs PostgreSQL: apt-get install postgresql"),
    pytest.mark.skipif(shutil.which("sglang-router") is None, reason="needs sglang-router 0.3.2 of PyPI on the PATH"),
]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
REPLICAS = ("replica-1", "replica-2")
# Of the machine that runs the tests, beside the environment of compose.yaml.
INHERITED = ("PATH", "HOME", "PYTHONPATH", "XDG_CACHE_HOME", "OMP_NUM_THREADS", "TMPDIR")


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The base URLs of both replicas and of the router, by service."""
    folder = tmp_path_factory.mktemp("compose")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        database = stack.enter_context(postgres.serving())
        for name in set(os.environ) - set(INHERITED):
            patch.delenv(name)
        found: dict[str, str] = {}
        for name in REPLICAS:
            command = (*CELLAR, "--host", "127.0.0.1", "--port", "{port}")
            given = environment(name) | {"CELLAR_STORE": database}
            found[name] = start(stack, command, "/ready", folder / name, given)
        found["router"] = start(stack, router_command(found), "/readiness", folder / "router", {})
        yield found


def start(stack: ExitStack, command: tuple[str, ...], ready: str, log: Path, given: dict[str, str]) -> str:
    url = stack.enter_context(started(command, ready=ready, log=log, environment=given))
    return url.removesuffix("/v1")


def environment(service: str) -> dict[str, str]:
    """The variables with a value, as Compose gives them to a container without a .env file."""
    given = SERVICES[service]["environment"]
    return {name: defaulted(str(value)) for name, value in given.items() if value is not None}


def defaulted(value: str) -> str:
    """The value without variables of the shell: ${NAME:-default} is its default."""
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value)


def router_command(replicas: dict[str, str]) -> tuple[str, ...]:
    """The command of the router, with the addresses of the replicas on this machine."""
    python = str(Path(str(shutil.which("sglang-router"))).with_name("python"))
    moved = {"python": python, "0.0.0.0": "127.0.0.1", "8000": "{port}"}
    moved |= {f"http://{name}:8000": url for name, url in replicas.items()}
    words = shlex.split(SERVICES["router"]["command"])
    assert set(moved) <= set(words)
    return tuple(moved.get(word, word) for word in words)


def test_conversations_find_their_prefix_through_the_router(addresses: dict[str, str]) -> None:
    """In the cache of the replica that answered before; both replicas get conversations."""
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(partial(converse, addresses["router"]), range(16)))

    assert sum(cached for cached, _ in found) > 0.55 * sum(prompt for _, prompt in found)
    assert 0 not in [prompt_tokens_of(addresses[name]) for name in REPLICAS]


def converse(url: str, number: int) -> tuple[int, int]:
    """Cached prompt tokens, and all, of a conversation of three turns."""
    cached = prompt = 0
    messages = [{"role": "user", "content": f"{number} " + f"conversation number {number} " * 40}]
    for _ in range(3):
        body = {"model": "cellar-tiny", "messages": messages, "max_tokens": 16}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        text = answer.raise_for_status().json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        prompt += answer.json()["usage"]["prompt_tokens"]
        cached += answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, prompt


def prompt_tokens_of(url: str) -> float:
    """Prompt tokens of all requests to a server."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return sum(map(float, re.findall(r"^vllm:prefix_cache_queries_total\S* (\S+)$", text, re.MULTILINE)))


def test_the_replicas_have_one_store(addresses: dict[str, str]) -> None:
    """A response of one is read, continued and deleted at the other."""
    one, other = (f"{addresses[name]}/v1/responses" for name in REPLICAS)
    created = httpx.post(one, json={"input": "hi", "max_output_tokens": 8}, timeout=60, trust_env=False).json()
    seen = httpx.get(f"{other}/{created['id']}", trust_env=False).json()
    body = {"input": "go on", "previous_response_id": created["id"], "max_output_tokens": 8}
    continued = httpx.post(other, json=body, timeout=60, trust_env=False)
    deleted = httpx.delete(f"{other}/{created['id']}", trust_env=False)

    assert created["output"] == seen["output"]
    assert [200, 200] == [continued.status_code, deleted.status_code]
    assert 404 == httpx.get(f"{one}/{created['id']}", trust_env=False).status_code


def test_the_replicas_accept_the_names_of_their_services(addresses: dict[str, str]) -> None:
    """The router sends them as Host."""
    statuses = [
        httpx.get(f"{addresses['replica-1']}/v1/models", headers={"Host": host}, trust_env=False).status_code
        for host in ("replica-1:8000", "elsewhere:8000")
    ]

    assert [200, 421] == statuses
