"""Two servers on one machine, each with a share of its memory: neither exceeds it, whatever they serve."""

from __future__ import annotations

import random
import tempfile
from contextlib import ExitStack

import httpx
import psutil
import pytest

from tests.e2e.serving import serving

SHARE = 0.06
WORDS = ("cellar", "cache", "prefix", "slot", "token", "batch", "draft", "model")


@pytest.mark.slow
@pytest.mark.skipif(not 2**34 <= psutil.virtual_memory().total <= 2**36, reason="a share of 6 % would be another plan")
def test_two_servers_stay_within_their_shares() -> None:
    """With prompts that fill the cache of each, which is planned for the share."""
    flags = ["--memory", f"{SHARE:.0%}", "--threads", "1", "--store", "memory", "--drafter", "none"]
    before = {each.pid for each in psutil.Process().children()}
    with tempfile.TemporaryFile("w") as errors, ExitStack() as stack:
        addresses = [stack.enter_context(serving(flags, errors)) for _ in range(2)]
        servers = [each for each in psutil.Process().children() if each.pid not in before]
        for address in addresses:
            fill(address)
        sizes = [server.memory_info().rss for server in servers]

    assert 2 == len(sizes)
    assert max(sizes) <= SHARE * psutil.virtual_memory().total


def fill(address: str) -> None:
    """Send prompts with more tokens than the cache has cells."""
    draw = random.Random(0)
    context = httpx.get(f"{address}/v1/models").json()["data"][0]["max_model_len"]
    cells = sum(group["total"] for group in httpx.get(f"{address}/v1/engine").json()["cells"])
    prompts = max(2, cells // (context // 2) + 1)
    for _ in range(prompts):
        text = " ".join(draw.choice(WORDS) for _ in range(context // 4))
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=300)
        assert 200 == answer.status_code, answer.text
