"""Every example request of Ollama's API documentation: its response has the documented fields, or names the reason."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest

from engine.text.fill_in_middle import FillInMiddle
from engine.types.events import Delta, Embedded, Event, Started
from engine.types.request import Request
from server.app import create_app
from tests.server.fakes import HERMES, FakeEngine, FakeTokenizer, ask, entry, finished, settings

MODEL = "llama3.2"
PROMPT = "Why is the sky blue?"
ASKED = [{"role": "user", "content": PROMPT}]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "available": {"type": "boolean"}},
    "required": ["age", "available"],
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}
CALL = {"function": {"name": "get_weather", "arguments": {"city": "Toronto"}}}
CALLED = [
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "11 degrees", "tool_name": "get_weather"},
]
HISTORY = [*ASKED, {"role": "assistant", "content": "rayleigh"}, {"role": "user", "content": "and mie?"}]
ALL_OPTIONS = {
    "num_keep": 5,
    "seed": 42,
    "num_predict": 30,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 0.7,
    "repeat_last_n": 33,
    "temperature": 0.8,
    "repeat_penalty": 1.2,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.0,
    "penalize_newline": True,
    "stop": ["\n", "user:"],
    "numa": False,
    "num_ctx": 1024,
    "num_batch": 2,
    "num_gpu": 1,
    "main_gpu": 0,
    "use_mmap": True,
    "num_thread": 8,
}
OLD_OPTIONS = {**ALL_OPTIONS, "low_vram": False, "vocab_only": False, "use_mlock": False}
MIROSTAT = {"mirostat": 1, "mirostat_tau": 0.8, "mirostat_eta": 0.6}

COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")
LINE = ("model", "created_at", "done")
LAST = (*LINE, "done_reason", *COUNTS)
ENTRY = ("name", "model", "modified_at", "size", "digest", "details")
DETAILS = ("parent_model", "format", "family", "families", "parameter_size", "quantization_level")
CARD = ("modelfile", "parameters", "template", "details", "model_info", "capabilities")


@dataclass(frozen=True)
class Example:
    """A request. `fields`: of the last line of the response; `refused`: part of the error's text."""

    name: str
    path: str
    body: dict[str, Any] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    refused: str = ""
    method: str = "POST"
    status: int = 200


def generate(name: str, refused: str = "", **body: Any) -> Example:
    body = {"prompt": PROMPT, **body}
    fields = LAST if body["prompt"] else (*LINE, "done_reason")
    return Example(f"generate {name}", "generate", body, (*fields, "response"), refused)


def chat(name: str, refused: str = "", **body: Any) -> Example:
    body = {"messages": ASKED, **body}
    fields = LAST if body["messages"] else (*LINE, "done_reason")
    return Example(f"chat {name}", "chat", body, (*fields, "message"), refused)


EXAMPLES = [
    generate("streaming"),
    generate("without stream", stream=False),
    generate("with suffix", suffix="    return result", options={"temperature": 0}, stream=False),
    generate("structured", stream=False, format=SCHEMA),
    generate("json mode", format="json", stream=False),
    generate("with images", refused="'images[0]'", stream=False, images=["iVBORw0KGgo="]),
    generate("raw", prompt="[INST] why? [/INST]", raw=True, stream=False),
    generate("reproducible", options={"seed": 123}),
    generate("with options", stream=False, options=ALL_OPTIONS),
    generate("with older options", stream=False, options=OLD_OPTIONS),
    generate("with mirostat", refused="'options.mirostat'", stream=False, options={**OLD_OPTIONS, **MIROSTAT}),
    generate("load", prompt=""),
    generate("unload", prompt="", keep_alive=0),
    generate("image generation", refused="'width'", width=1024, height=768),
    generate("system", system="Answer briefly.", stream=False),
    generate("template", refused="'template'", template="{{ .Prompt }}"),
    generate("context", refused="'context'", context=[1, 2, 3]),
    generate("think", think=True, stream=False),
    generate("logprobs", logprobs=True, top_logprobs=3, stream=False),
    generate("keep_alive", keep_alive="10m", stream=False),
    generate("shift and truncate", shift=True, truncate=True, stream=False),
    chat("streaming"),
    chat("streaming with tools", tools=[TOOL], stream=True),
    chat("without stream", stream=False),
    chat("without stream, with tools", tools=[TOOL], stream=False),
    chat("structured", format=SCHEMA, stream=False, options={"temperature": 0}),
    chat("json mode", format="json", stream=False),
    chat("with history", messages=HISTORY),
    chat("with history and tools", messages=CALLED, tools=[TOOL], stream=False),
    chat("with images", refused="'messages[0].images[0]'", messages=[{**ASKED[0], "images": ["iVBORw0KGgo="]}]),
    chat("reproducible", options={"seed": 101, "temperature": 0}, stream=False),
    chat("with tools", tools=[TOOL], stream=False, options={}),
    chat("load", messages=[]),
    chat("unload", messages=[], keep_alive=0),
    chat("think", think=True),
    chat("think level", think="high", stream=False),
    chat("logprobs", logprobs=True, top_logprobs=2),
    chat(
        "with thinking in the history",
        messages=[*ASKED, {"role": "assistant", "content": "a", "thinking": "b"}, *ASKED],
    ),
    Example("create", "create", {"model": "mario", "from": MODEL, "system": "You are Mario."}, ("status",)),
    Example("create without stream", "create", {"model": "mario", "from": MODEL, "stream": False}, ("status",)),
    Example("create quantized", "create", {"model": "q", "from": MODEL, "quantize": "q4_K_M"}, refused="'quantize'"),
    Example("create from GGUF", "create", {"model": "g", "files": {"a.gguf": "sha256:43"}}, refused="'files'"),
    Example(
        "create from safetensors", "create", {"model": "s", "files": {"config.json": "sha256:dd"}}, refused="'files'"
    ),
    Example("create by Modelfile", "create", {"model": "m", "modelfile": "FROM llama3.2"}, refused="'modelfile'"),
    Example("check a blob", "blobs/sha256:29fdb92e", method="HEAD", status=404),
    Example("push a blob", "blobs/sha256:29fdb92e", refused="no model files"),
    Example("list", "tags", fields=("models",), method="GET"),
    Example("show", "show", {"model": MODEL}, CARD),
    Example("show verbose", "show", {"model": MODEL, "verbose": True}, CARD),
    Example("copy", "copy", {"source": MODEL, "destination": "llama3-backup"}),
    Example("delete", "delete", {"model": "llama3:13b"}, method="DELETE", status=404, refused="not a model"),
    Example("pull", "pull", {"model": MODEL}, ("status",)),
    Example("pull without stream", "pull", {"model": MODEL, "stream": False}, ("status",)),
    Example("push", "push", {"model": "mattw/pygmalion:latest"}, refused="uploads no models"),
    Example("embed", "embed", {"model": MODEL, "input": PROMPT}, ("model", "embeddings", *COUNTS[:3])),
    Example("embed several", "embed", {"model": MODEL, "input": [PROMPT, "Why?"]}, ("model", "embeddings")),
    Example("embed truncated", "embed", {"model": MODEL, "input": "x" * 65, "truncate": True}, ("embeddings",)),
    Example(
        "embed untruncated", "embed", {"model": MODEL, "input": "x" * 65, "truncate": False}, refused="context length"
    ),
    Example("embed dimensions", "embed", {"model": MODEL, "input": PROMPT, "dimensions": 2}, ("embeddings",)),
    Example("list running", "ps", fields=("models",), method="GET"),
    Example("embedding", "embeddings", {"model": MODEL, "prompt": "An article"}, ("embedding",)),
    Example("version", "version", fields=("version",), method="GET"),
]


def script(request: Request) -> Iterator[Event]:
    """A vector, or three letters."""
    yield Started(len(request.prompt), 0, 7)
    if request.pooling:
        yield Embedded(struct.pack("<2f", 3.0, 4.0))
    else:
        for letter in "yes":
            yield Delta(letter, (ord(letter),), (entry(ord(letter), letter, request.logprobs or 0),))
    yield finished(request)


@pytest.fixture
def app() -> Any:
    tokenizer = FakeTokenizer(HERMES)
    tokenizer.fill_in_middle = FillInMiddle(1, 2, 3, ())
    return create_app(FakeEngine(script, tokenizer=tokenizer), settings(served_names=(MODEL,)))  # type: ignore[arg-type]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name.replace(" ", "-"))
def test_documented_request(app: Any, example: Example) -> None:
    """As sent by `curl -d`, without a content type of JSON."""
    body = {"model": MODEL, **example.body} if example.path in ("generate", "chat") else example.body
    answer = ask(
        app,
        example.method,
        f"/api/{example.path}",
        json_body=body or None,
        headers={"content-type": "application/x-www-form-urlencoded"},
    )
    lines = [json.loads(line) for line in answer.body.splitlines()]

    if example.refused:
        assert (example.status if example.status != 200 else 400) == answer.status
        assert example.refused in lines[0]["error"]
        return
    assert example.status == answer.status, answer.body
    if example.fields:
        assert set(example.fields) <= lines[-1].keys()
    if example.path in ("generate", "chat"):
        assert [MODEL] * len(lines) == [line["model"] for line in lines]
        assert all(datetime.fromisoformat(line["created_at"]) for line in lines)


def test_lists_have_all_documented_fields(app: Any) -> None:
    """Beside those of the older documentation, the context length of running models."""
    [listed] = ask(app, "GET", "/api/tags").json["models"]
    [running] = ask(app, "GET", "/api/ps").json["models"]

    assert {*ENTRY} <= listed.keys()
    assert {*ENTRY, "expires_at", "size_vram", "context_length"} <= running.keys()
    assert set(DETAILS) == listed["details"].keys() == running["details"].keys()
    assert datetime.fromisoformat(running["expires_at"])


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_root_answers_clients_that_look_for_a_server(app: Any, method: str) -> None:
    assert 200 == ask(app, method, "/").status
