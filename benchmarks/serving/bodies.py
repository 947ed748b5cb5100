"""Large request bodies for every endpoint, valid and invalid: known ones that stalled a server, and random ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MARGIN_BYTES = 256
SMALLEST_BYTES = 4 * 1024
PNG = "data:image/png;base64,"
BREAKPOINT = {"mode": "explicit"}


BOUNDARY = "cellar-boundary"
JSON, FORM = "application/json", f"multipart/form-data; boundary={BOUNDARY}"


@dataclass(frozen=True, slots=True)
class Body:
    """One request."""

    name: str
    path: str
    content: bytes
    content_type: str = JSON


def filled(path: str, name: str, size: int, before: str, item: Callable[[int], str], after: str) -> Body:
    """Return a body of at most `size` bytes, with as many items between two texts as fit."""
    items, left = [], size - MARGIN_BYTES - len(before) - len(after)
    for number in range(left):
        text = item(number)
        left -= len(text) + 1
        if left < 0:
            break
        items.append(text)
    return Body(name, path, (before + ",".join(items) + after).encode())


def known(size: int) -> Iterator[Body]:
    """Yield known bodies and valid variants of about `size` bytes."""
    chat, user = "/v1/chat/completions", '{"max_tokens":1,"messages":[{"role":"user","content":'
    part = '{"type":"text","text":"ab"}'
    yield filled(chat, "content of numbers", size, user + "[", lambda _: "1", "]}]}")
    yield filled(chat, "parts of an unknown type", size, user + "[", lambda _: '{"type":"x"}', "]}]}")
    yield filled(chat, "valid parts", size, user + "[", lambda _: part, "]}]}")
    yield filled(chat, "unknown keys", size, user + '"a"}],', lambda at: f'"k{at}":1', "}")
    yield filled(chat, "logit_bias", size, user + '"a"}],"logit_bias":{', lambda at: f'"{at}":"x"', "}}")
    yield filled(chat, "metadata", size, user + '"a"}],"metadata":{', lambda at: f'"{at}":1', "}}")
    yield filled(chat, "empty lists", size, user + "[", lambda _: "[]", "]}]}")
    yield filled(chat, "one text", size, user + '"', lambda _: "some words", '"}]}')
    yield filled(chat, "messages", size, '{"max_tokens":1,"messages":[', message, "]}")
    yield filled(chat, "2,048 long messages", size, '{"max_tokens":1,"messages":[', long_message(size), "]}")
    yield filled(chat, "tools", size, user + '"a"}],"tools":[', long_tool(size), "]}")
    yield filled(chat, "schema", size, user + '"a"}],"guided_json":{"enum":[', lambda at: f'"{at}"', "]}}")
    for count in (2000, 3000, 10**9):
        yield breakpoints(count, size)
    yield filled("/detokenize", "tokens -1", size, '{"tokens":[', lambda _: "-1", "]}")
    yield filled("/detokenize", "tokens", size, '{"tokens":[', lambda at: str(1000 + at % 900), "]}")
    yield filled("/tokenize", "text", size, '{"prompt":"', lambda _: "some words", '"}')
    yield filled("/tokenize", "pieces", size // 16, '{"with_pieces":true,"prompt":"', lambda _: "some", '"}')
    yield filled("/v1/completions", "token ids", size, '{"max_tokens":1,"prompt":[', lambda at: str(at % 900), "]}")
    yield filled("/v1/embeddings", "inputs", size, '{"input":[', lambda _: '"a b"', "]}")
    yield filled("/v1/responses", "items", size, '{"max_output_tokens":1,"input":[', message, "]}")
    yield filled(
        "/v1/messages", "blocks", size, '{"model":"cellar","max_tokens":1,' + user[16:] + "[", lambda _: part, "]}]}"
    )
    yield filled("/api/chat", "messages", size, '{"model":"cellar","messages":[', message, "]}")
    yield filled("/rerank", "documents", size, '{"query":"q","documents":[', lambda _: '"a b"', "]}")
    yield filled("/v1/score", "texts", size, '{"text_1":"q","text_2":[', lambda _: '"a b"', "]}")
    question = '{"type":"predicate","instructions":"a"}'
    yield filled("/v1/decisions", "questions", size, '{"input":"a","questions":[', lambda _: question, "]}")


def breakpoints(count: int, size: int) -> Body:
    """Return a chat of empty parts with a cache breakpoint each."""
    part = json.dumps({"type": "text", "text": "", "prompt_cache_breakpoint": BREAKPOINT}, separators=(",", ":"))
    before, after = '{"max_tokens":1,"messages":[{"role":"user","content":[', "]}]}"
    most = min(size, count * (len(part) + 1) + MARGIN_BYTES + len(before) + len(after))
    named = f"{count:,} breakpoints" if most < size else "breakpoints"
    return filled("/v1/chat/completions", named, most, before, lambda _: part, after)


def message(number: int) -> str:
    """Return a short message."""
    role = "assistant" if number % 2 else "user"
    return f'{{"role":"{role}","content":"words {number}"}}'


def long_message(size: int) -> Callable[[int], str]:
    """Return messages such that 2,048 fill a body."""
    text = "words " * (size // 2048 // 6 - 8)
    return lambda number: f'{{"role":"{"assistant" if number % 2 else "user"}","content":"{text}"}}'


def long_tool(size: int) -> Callable[[int], str]:
    """Return tools such that 256 fill a body."""
    properties = {f"p{at}": {"type": "string", "description": "words"} for at in range(size // 256 // 50)}
    schema = json.dumps({"type": "object", "properties": properties}, separators=(",", ":"))
    return lambda at: f'{{"type":"function","function":{{"name":"f{at}","parameters":{schema}}}}}'


# Small valid bodies, the base of random ones.
SEEDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "store": False},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {"model": "cellar", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
    "/v1/messages/count_tokens": {"model": "cellar", "messages": [{"role": "user", "content": "a"}]},
    "/v1/embeddings": {"input": "a"},
    "/v1/decisions": {"input": "a", "questions": [{"type": "predicate", "instructions": "a"}]},
    "/rerank": {"query": "a", "documents": ["a"]},
    "/v1/score": {"text_1": "a", "text_2": ["a"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": [{"role": "user", "content": "a"}]},
    "/api/chat": {"model": "cellar", "stream": False, "messages": [{"role": "user", "content": "a"}]},
    "/api/generate": {"model": "cellar", "stream": False, "prompt": "a"},
    "/api/embed": {"model": "cellar", "input": "a"},
    "/api/show": {"model": "cellar"},
    "/completion": {"prompt": "a", "n_predict": 1},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 1},
    "/v1/completions/render": {"prompt": "a"},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/chat/completions/input_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses/compact": {"model": "cellar", "input": "a"},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "b"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
# Fields that get large values.
FIELDS = (
    "messages content tools tool_choice functions logit_bias metadata stop stop_regex stop_token_ids bad_words prompt "
    "input documents questions text_1 text_2 tokens system chat_template_kwargs response_format guided_json regex "
    "grammar guided_choice allowed_token_ids prediction include reasoning options format unknown query instructions"
)
# Items of large values.
ITEMS: tuple[Any, ...] = (
    0,
    -1,
    7,
    1.5,
    None,
    True,
    "",
    "ab",
    "\u00e9\U0001f600",
    '\\"\n',
    [],
    {},
    [[]],
    {"a": 1},
    {"type": "text", "text": "ab"},
    {"type": "text", "text": "ab", "prompt_cache_breakpoint": BREAKPOINT},
    {"type": "input_text", "text": "ab"},
    {"type": "image_url", "image_url": {"url": "x"}},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "ab"},
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"type": "predicate", "instructions": "ab"},
    {"text": "ab"},
)


USER = {"role": "user", "content": "ab"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "ab"}] * 64}
# Valid values: path, field, repeated item, and maximum count.
VALID: tuple[tuple[str, str, Any, int], ...] = (
    ("/v1/chat/completions", "messages", [USER], 2048),
    ("/v1/chat/completions", "messages", [PARTS], 256),
    ("/v1/chat/completions", "guided_choice", ["ab"], 1024),
    ("/v1/completions", "prompt", [7], 2**18),
    ("/v1/completions", "prompt", "some words ", 100_000),
    ("/v1/responses", "input", [USER], 2048),
    ("/v1/responses/input_tokens", "input", [USER], 2048),
    ("/v1/messages", "messages", [USER], 2048),
    ("/v1/messages/count_tokens", "messages", [PARTS], 256),
    ("/v1/embeddings", "input", ["ab"], 200),
    ("/v1/decisions", "questions", [{"type": "predicate", "instructions": "a"}], 100),
    ("/rerank", "documents", ["ab"], 200),
    ("/tokenize", "prompt", "some words ", 30_000),
    ("/tokenize", "messages", [USER], 2048),
    ("/detokenize", "tokens", [7], 2**18),
    ("/apply-template", "messages", [PARTS], 256),
    ("/api/chat", "messages", [USER], 2048),
    ("/api/generate", "prompt", "some words ", 30_000),
    ("/api/embed", "input", ["ab"], 200),
)
VALID_SHARE = 0.3
FORM_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
FORM_SHARE = 0.02


def answer_of(count: int) -> dict[str, Any]:
    """Return the fields of an answer of `count` tokens."""
    return {"temperature": 0, "overflow": "shift", "ignore_eos": True, "max_tokens": count}


def continued(count: int) -> dict[str, Any]:
    """Return the fields of an answer that goes on after `count` tokens."""
    return {**answer_of(count + 1), "continue_from": {"tokens": [70] * count}}


def schema_of(count: int) -> dict[str, Any]:
    """Return a JSON schema with many properties."""
    properties = {f"p{number}": {"type": "string", "description": "words"} for number in range(count)}
    return {"type": "object", "properties": properties}


def tools_of(count: int) -> list[dict[str, Any]]:
    """Return tools with short schemas."""
    return [{"type": "function", "function": {"name": f"f{at}", "parameters": schema_of(4)}} for at in range(count)]


CHAT = {"messages": [USER], "max_tokens": 1}
LONG_PENALTY = {"repetition_penalty": 1.2, "repeat_last_n": 2**14}
# Valid bodies whose work is in several fields or in the answer, by path and description: largest count, and the fields.
COMPOSED: dict[tuple[str, str], tuple[int, Callable[[int], dict[str, Any]]]] = {
    ("/v1/completions", "continued tokens"): (2**17, continued),
    ("/v1/chat/completions", "continued tokens"): (2**15, lambda count: {**CHAT, **continued(count), **LONG_PENALTY}),
    ("/v1/completions", "log-probabilities of an answer"): (512, lambda count: {**answer_of(count), "logprobs": 20}),
    ("/v1/completions", "log-probabilities of a prompt"): (
        2**11,
        lambda count: {"prompt": [70] * count, "max_tokens": 1, "prompt_logprobs": 20},
    ),
    ("/v1/chat/completions", "tokens with a bias"): (
        2**11,
        lambda count: {**CHAT, "logit_bias": {str(token): 1 for token in range(count)}},
    ),
    ("/v1/chat/completions", "tools"): (128, lambda count: {**CHAT, "tools": tools_of(count)}),
    ("/v1/chat/completions", "properties of a schema"): (
        2**11,
        lambda count: {**CHAT, "guided_json": schema_of(count)},
    ),
    ("/v1/completions", "characters of stop strings"): (
        256,
        lambda count: {**answer_of(64), "stop": ["a" * count + letter for letter in "bcde"]},
    ),
    ("/v1/chat/completions", "bytes of an image"): (
        2**21,
        lambda count: {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG + "A" * count}}]}]
        },
    ),
}


def composed_body(chance: random.Random) -> Body:
    """Return one of the composed bodies, with a log-uniform count."""
    path, name = chance.choice(tuple(COMPOSED))
    largest, fields = COMPOSED[path, name]
    count, is_streamed = int(largest ** chance.random()), chance.random() < 0.5
    prompt = {"prompt": "a"} if path == "/v1/completions" else {}
    body = {**prompt, **fields(count), **({"stream": True} if is_streamed else {})}
    content = json.dumps(body, separators=(",", ":")).encode()
    return Body(f"{count} {name}{', streamed' if is_streamed else ''}", path, content)


def form_body(chance: random.Random, size: int) -> Body:
    """Return a form with a large file or many fields."""
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="'
    field = f'{head}model"\r\n\r\ncellar\r\n'
    kind = chance.choice(("file", "fields"))
    file = f'{head}file"; filename="a.wav"\r\n\r\n{"RIFF" * (size // 4 if kind == "file" else 1)}\r\n'
    text = file + field * (size // len(field) if kind == "fields" else 1) + f"--{BOUNDARY}--\r\n"
    return Body(f"form: large {kind}", chance.choice(FORM_PATHS), text.encode(), FORM)


def valid_body(chance: random.Random) -> Body:
    """Return a body that follows its schema, with a log-uniform number of items."""
    path, field, item, most = chance.choice(VALID)
    count = int(most ** chance.random())
    rest = {} if path != "/tokenize" or field == "prompt" else {"prompt": None}
    content = json.dumps({**SEEDS[path], **rest, field: item * count}, separators=(",", ":")).encode()
    return Body(f"valid {field}: {count} of {json.dumps(item)[:24]}", path, content)


def random_body(chance: random.Random, largest: int) -> Body:
    """Return a valid body, or one of log-uniform size: a small valid one with a large value somewhere in it."""
    if chance.random() < VALID_SHARE:
        return valid_body(chance) if chance.random() < 0.5 else composed_body(chance)
    if chance.random() < FORM_SHARE:
        return form_body(chance, largest)
    path = chance.choice(sorted(SEEDS))
    body = json.loads(json.dumps(SEEDS[path]))
    size = int(SMALLEST_BYTES * (largest / SMALLEST_BYTES) ** chance.random())
    kind, value = large_value(chance, size)
    field = chance.choice([*FIELDS.split(), *SEEDS[path]])
    holders = [body, *(item for items in body.values() if isinstance(items, list) for item in items)]
    holder = chance.choice([each for each in holders if isinstance(each, dict)])
    if kind == "keys" and chance.random() < 0.5:
        holder.update(value)
    else:
        holder[field] = value
    content = json.dumps(body, separators=(",", ":"), ensure_ascii=chance.random() < 0.5).encode()
    return Body(f"{field}: {kind}", path, content[:largest] if len(content) > largest else content)


def large_value(chance: random.Random, size: int) -> tuple[str, Any]:
    """Return a value of about `size` bytes and its description."""
    item = chance.choice(ITEMS)
    width = len(json.dumps(item)) + 1
    match chance.choice(("list", "list", "list", "keys", "text", "nested", "mixed")):
        case "list":
            return f"list of {json.dumps(item)[:40]}", [item] * (size // width)
        case "keys":
            return "keys", {f"k{at}": item for at in range(size // (width + 9))}
        case "text":
            unit = chance.choice(
                ("some words ", "a", "\u00e9", "\U0001f600", '"', "\\", "\n", "<|im_start|>", "[", "1,")
            )
            return f"text of {unit!r}", unit * (size // len(json.dumps(unit)))
        case "nested":
            rows = max(int((size / width) ** 0.5), 1)
            return f"lists of {json.dumps(item)[:40]}", [[item] * rows] * rows
        case _:
            some = chance.choices(ITEMS, k=16)
            return "mixed list", some * (size // len(json.dumps(some)) + 1)


WORDS = ["water", "cheese", "server", "token", "memory", "table", "window", "garden", "river", "letter"]


def words(chance: random.Random, count: int) -> str:
    """A text that is hardly in the prefix cache."""
    return " ".join(chance.choices(WORDS, k=count))
