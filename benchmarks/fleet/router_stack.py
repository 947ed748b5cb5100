"""Starts three servers of the bundled model, and the routers of docs/scale.md in front of two and of three of them.

A router without its program is left out: `sglang-router` and `vllm-router` in a folder of programs, Ray Serve in the
environment of this process.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from bench.launch import CELLAR, cellar, started

SERVER = ("--threads", "1", "--context", "2048", "--slots", "8", "--store", "none", "--drafter", "none")
READY_SECONDS = 60
RAY = (*CELLAR[:-1], "ray", "--port", "{port}", "--replicas", "3", *SERVER)


@contextmanager
def router_stack(programs: Path, logs: Path) -> Iterator[dict[str, str]]:
    """The base URL of one server and of each router, by name; all end with the block.

    programs  folder with sglang-router and vllm-router
    """
    with ExitStack() as stack:
        workers = [
            stack.enter_context(cellar(SERVER, logs / f"server-{number}.log")).removesuffix("/v1")
            for number in range(3)
        ]
        found = {"one server": workers[0]}
        for name, command in commands(programs, workers).items():
            log = logs / f"{name.replace(' ', '-')}.log"
            url = stack.enter_context(started(command, ready="/health", log=log)).removesuffix("/v1")
            wait_until_routed(url)
            found[name] = url
        yield found


def commands(programs: Path, workers: Sequence[str]) -> dict[str, Sequence[str]]:
    """The commands of the routers with a program, by the name and the number of replicas."""
    sglang, vllm = programs / "sglang-router", programs / "vllm-router"
    found: dict[str, Sequence[str]] = {}
    for count in (2, 3):
        urls = ("--worker-urls", *workers[:count])
        if sglang.exists():
            python = (str(programs / "python"), "-m", "sglang_router.launch_router")
            found[f"sglang-router, {count}"] = (*python, *ports(count), "--policy", "cache_aware", *urls)
            if count == 3:
                found[f"random, {count}"] = (*python, *ports(9), "--policy", "random", *urls)
        if vllm.exists():
            found[f"vllm-router, {count}"] = (str(vllm), *ports(count + 2), "--policy", "consistent_hash", *urls)
    if importlib.util.find_spec("ray") is not None:
        found["Ray Serve, 3"] = RAY
    return found


def ports(number: int) -> tuple[str, ...]:
    """The address of a router, and the port of its own metrics, which several on one machine cannot share."""
    return ("--host", "127.0.0.1", "--port", "{port}", "--prometheus-port", str(29_000 + number))


def wait_until_routed(url: str) -> None:
    """Wait until a router answers a chat: it looks for its workers after its own start."""
    body = {"model": "cellar-tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    deadline = time.monotonic() + READY_SECONDS
    while httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30, trust_env=False).status_code != 200:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} answers no chat")
        time.sleep(0.5)
