"""What the server says when it starts: phases, the model, the memory plan, the settings, where to go."""

from __future__ import annotations

from collections.abc import Iterator

from engine.types.status import DraftingInfo, EmbeddingModelInfo, MemoryPlan, ModelInfo
from server.http.version import version
from server.settings import Settings
from server.store.store import describe_location

GIB = 2**30


def banner(
    info: ModelInfo,
    memory: MemoryPlan,
    drafting: DraftingInfo,
    settings: Settings,
    url: str,
    embedding: EmbeddingModelInfo | None = None,
) -> str:
    """The first screen, once the model answers."""
    rows = [*_lines(info, memory, drafting, settings), *(() if embedding is None else (_embedding_line(embedding),))]
    return "\n".join(
        [
            f"Cellar {version()} serves {', '.join(settings.model_names)}",
            *(f"  {name:<9} {text}" for name, text in rows),
            *_url_lines(settings, url),
        ]
    )


def _lines(
    info: ModelInfo, memory: MemoryPlan, drafting: DraftingInfo, settings: Settings
) -> Iterator[tuple[str, str]]:
    yield "model", f"{info.architecture}, {_count(info.parameters)} parameters, {info.dtype}, from {info.folder}"
    longest = f" (--context: up to {info.max_context})" if info.max_context > info.context else ""
    yield "context", f"{info.context} tokens a sequence{longest}, {info.slots} slots, overflow: {settings.overflow}"
    yield "steps", _step_text(info)
    yield "batches", _invariance_text(info)
    yield "queue", f"{settings.max_waiting} requests may wait"
    windows = f" + windows {_size(memory.window_bytes)}" if memory.window_bytes else ""
    yield (
        "memory",
        f"weights {_size(memory.weights_bytes)} + cache {_size(memory.cache_bytes)} "
        f"({memory.cells} tokens x {_size(memory.cell_bytes)}{windows}) + work {_size(memory.workspace_bytes)} "
        f"= {_size(memory.weights_bytes + memory.cache_bytes + memory.workspace_bytes)} "
        f"of {_size(memory.available_bytes)} free",
    )
    yield "drafts", _draft_text(drafting, settings.draft_tokens)
    if settings.disk_cache is not None:
        yield "shelf", f"{settings.disk_cache}, {_size(settings.disk_cache_bytes)} at most"
    yield "responses", describe_location(settings.store)
    if settings.origins:
        yield "pages", f"of {', '.join(settings.origins)} may call from a browser"
    yield "keys", f"{len(settings.keys)} API keys" if settings.keys else "none: whoever reaches the port is served"


def _step_text(info: ModelInfo) -> str:
    """How steps are computed, and what --quantize would bring."""
    how = (
        "one native call"
        if info.not_native_reason is None
        else f"in torch operations, not natively: {info.not_native_reason}"
    )
    offer = info.quantization_estimate
    if offer is None:
        return how
    reads = " or ".join(f"{kind} {share:.0%}" for kind, share in offer.relative_bytes)
    auto = "leaves weights as they are" if offer.auto is None else f"takes {offer.auto}"
    return f"{how}; weights that a token reads with --quantize, of those now: {reads}; auto {auto}"


def _invariance_text(info: ModelInfo) -> str:
    """What other requests can change in a text."""
    if info.batch_invariant:
        return "logits are the same bit for bit beside any requests"
    return (
        "logits depend on other requests by rounding, which may decide between tokens that are all but equally likely"
    )


def _draft_text(drafting: DraftingInfo, tokens: int | None) -> str:
    """Who guesses ahead, how far, and what the model among them takes."""
    if not drafting.kinds:
        return "none"
    far = "as many tokens as pay" if tokens is None else f"{tokens} tokens"
    text = f"{' and '.join(drafting.kinds)}, {far} at a time"
    if drafting.model is None or drafting.memory is None:
        return text
    model, memory = drafting.model, drafting.memory
    return (
        f"{text}; {model.architecture}, {_count(model.parameters)} parameters, from {model.folder}: "
        f"weights {_size(memory.weights_bytes)} + cache {_size(memory.cache_bytes)}"
    )


def _embedding_line(embedding: EmbeddingModelInfo) -> tuple[str, str]:
    """Who makes vectors or ranks, how long a text it reads, and what it takes."""
    model, length = embedding.model, f" of {embedding.dimensions} numbers" if embedding.output_kind == "vectors" else ""
    return embedding.output_kind, (
        f"{model.architecture}, {_count(model.parameters)} parameters, {model.dtype}, from {model.folder}: "
        f"{embedding.output_kind}{length}, {model.context} tokens a text, "
        f"weights {_size(embedding.weights_bytes)} + work {_size(embedding.workspace_bytes)}"
    )


def _url_lines(settings: Settings, url: str) -> Iterator[str]:
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.keys else ""
    body = f'{{"model": "{settings.model_names[0]}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    yield f"  API       {url}/v1    metrics {url}/metrics    types {url}/openapi.json"
    yield f"  try       curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _size(number: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
