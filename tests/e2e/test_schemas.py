"""Structured output end to end: a schema gives JSON that it allows, or a 400 that says why not. Never anything else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.e2e.corpus import SIZE, Schema, corpus

# A tiny model may write a long text into a string: then another sample may end.
SEEDS = range(6)
# Every twentieth in the default run.
QUICK = corpus()[::20]


@pytest.fixture(scope="module")
def client(bundled_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=bundled_url, timeout=60) as client:
        yield client


def ask(client: httpx.Client, schema: Schema, seed: int) -> httpx.Response:
    """An answer that must follow the schema."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Tell me of a city as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}},
        "max_tokens": 160,
        "temperature": 0.8,
        # Else a tiny model writes one digit of a fraction after the other.
        "frequency_penalty": 0.5,
        "seed": seed,
    }
    return client.post("/v1/chat/completions", json=body)


def outcome(client: httpx.Client, schema: Schema) -> str:
    """Whether it was followed, by valid JSON; refused, in words; or cut, where no sample came to an end."""
    for seed in SEEDS:
        answer = ask(client, schema, seed)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert (400, "response_format") == (answer.status_code, error["param"].partition(".")[0]), answer.text
            assert len(error["message"]) > len("Invalid value for 'response_format': ."), answer.text
            return "refused"
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
            return "followed"
    return "cut"


@pytest.mark.parametrize("schema", QUICK, ids=lambda schema: json.dumps(schema)[:60])
def test_a_schema_is_followed_or_refused(client: httpx.Client, schema: Schema) -> None:
    """Some schemas of each kind."""
    assert outcome(client, schema) in ("followed", "refused")


@pytest.mark.slow
def test_every_schema_is_followed_or_refused(client: httpx.Client) -> None:
    """All two hundred. A tiny model may not end a value without a maximum length, such as an address."""
    counts = Counter(outcome(client, schema) for schema in corpus())

    assert SIZE == counts.total()
    assert counts["cut"] <= 10, counts
    assert counts["refused"] <= 40, counts
