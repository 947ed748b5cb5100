"""A batch over kill -9 and a restart, with the bundled model and OpenAI's own client."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.prompts import sentence
from tests.e2e.serving import ROOT, read_address

REQUESTS = 200
PATIENCE_SECONDS = 240.0


@contextmanager
def served(store: Path) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """A server with this store, and a client; it may be killed."""
    options = ["--store", f"{store}", "--context", "256", "--slots", "4", "--threads", "1", "--port", "0"]
    command = [sys.executable, "-c", "from server.cli import main; main()", "serve", *options]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server,
        openai.OpenAI(base_url=f"{read_address(server)}/v1", api_key="none", max_retries=2) as client,
    ):
        try:
            yield server, client
        finally:
            server.kill()


def line(number: int) -> dict[str, Any]:
    """A request; some have a temperature and a seed."""
    sampling = {"temperature": 0} if number % 2 else {"temperature": 1, "seed": number}
    body = {"messages": [{"role": "user", "content": sentence(8, f"{number}")}], "max_tokens": 24, **sampling}
    return {"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


@pytest.mark.slow
def test_nothing_is_lost_or_computed_twice_over_a_kill_and_a_restart(tmp_path: Path) -> None:
    """Each of 200 requests has one result, with the text that it gets online."""
    store = tmp_path / "store.sqlite"
    with served(store) as (server, client):
        content = "\n".join(json.dumps(line(number)) for number in range(REQUESTS)).encode()
        file = client.files.create(file=("requests.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"run": "1"}
        )
        give_up = time.monotonic() + PATIENCE_SECONDS
        while (counts := client.batches.retrieve(batch.id).request_counts) is None or counts.completed < REQUESTS // 4:
            assert time.monotonic() < give_up
            time.sleep(0.05)
        server.send_signal(signal.SIGKILL)
        server.wait(30)
        assert counts.completed < REQUESTS

    with served(store) as (_, client):
        give_up = time.monotonic() + PATIENCE_SECONDS
        while (after := client.batches.retrieve(batch.id)).status != "completed":
            assert time.monotonic() < give_up, after
            time.sleep(0.2)
        assert after.request_counts is not None
        assert (REQUESTS, 0) == (after.request_counts.completed, after.request_counts.failed)
        results = [json.loads(text) for text in client.files.content(after.output_file_id or "").text.splitlines()]
        assert [f"{number}" for number in range(REQUESTS)] == [result["custom_id"] for result in results]
        for number in range(0, REQUESTS, 10):
            online = client.chat.completions.create(model="cellar-tiny", **line(number)["body"])
            text = results[number]["response"]["body"]["choices"][0]["message"]["content"]
            assert online.choices[0].message.content == text
