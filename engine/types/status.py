"""What the engine says of itself across its border: the model, its memory, who drafts, and the state after a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How vectors are compared: names of sentence-transformers.
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]


@dataclass(frozen=True, slots=True)
class QuantizationEstimate:
    """What quantising the weights of a model would bring.

    relative_bytes  of each format the bytes of weights that a token would read, in parts of those it reads now
    auto   the format that `auto` takes; None: it leaves the weights as they are
    """

    relative_bytes: tuple[tuple[str, float], ...]
    auto: str | None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the loaded model is. `folder` is where it came from, `name` how it was asked for.

    max_context          tokens that a context may have here with another setting: what the model and the memory allow
    decoder_start_tokens            tokens that a prompt begins with where the model has an encoder beside the decoder, or none
    batch_invariant  whether the logits of a text are the same bit for bit beside any neighbours, in any chunks and
                     behind any prefix hit; else they are so but for rounding
    not_native_reason     why steps run in torch operations; None: each is one call of the C++ library
    quantization_estimate   what quantising its weights would bring; None: they are quantised, or cannot be
    """

    name: str
    folder: str
    fingerprint: str
    architecture: str
    parameters: int
    dtype: str
    vocabulary: int
    context: int
    slots: int
    max_context: int = 0
    decoder_start_tokens: tuple[int, ...] = ()
    device: str = "cpu"
    batch_invariant: bool = False
    not_native_reason: str | None = None
    quantization_estimate: QuantizationEstimate | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the memory is used for. The cache is allocated once, at the start.

    weights_bytes    of the model as loaded
    cells            tokens that the shared cache holds
    cell_bytes       one token's keys and values in every layer that sees the whole text
    window_bytes     what layers that see a window or chunk of it hold besides, however long it is
    cache_bytes      cells x cell_bytes + window_bytes
    workspace_bytes       an upper estimate of what one step needs for a while
    available_bytes  what the machine had free before the model was loaded
    """

    weights_bytes: int
    cells: int
    cell_bytes: int
    cache_bytes: int
    workspace_bytes: int
    available_bytes: int
    window_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DraftingInfo:
    """Who guesses at text: the kinds of drafters, and the model that drafts with its own memory, where one does."""

    kinds: tuple[str, ...] = ()
    model: ModelInfo | None = None
    memory: MemoryPlan | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingModelInfo:
    """What the embedding model is.

    model        its `context` is the longest text in tokens; it has no slots
    output_kind        vectors of texts, or scores of pairs of them
    dimensions   of a vector
    prompts      the names of what texts are given for their purpose
    similarity   how two vectors are compared
    weights_bytes, workspace_bytes  what it takes of the memory: always, and for a while
    """

    model: ModelInfo
    output_kind: Literal["vectors", "scores"]
    dimensions: int
    prompts: tuple[str, ...]
    similarity: Similarity
    weights_bytes: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class EmbeddingCounts:
    """What the embedding model has done. `waiting` are texts that it has not computed yet; totals since the start."""

    waiting: int = 0
    texts_total: int = 0
    tokens_total: int = 0
    batches_total: int = 0
    seconds_total: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What became of the drafts of one kind of drafter, by the position in the draft: tokens drafted, and said."""

    kind: str
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """The state of the engine after its latest step. Totals count since the start.

    cells_used        cells of running sequences
    cells_cached  further cells, kept for prompts to come and given up for running ones
    shelf_memory_bytes, offload_disk_bytes  of remembered content outside the cells
    prefix_hits_total  requests that are over and found a beginning of their prompt in the cache
    evicted_tokens_total, trimmed_tokens_total, loaded_tokens_total, written_tokens_total  see kvcache.prefix.PrefixCounts
    """

    running: int = 0
    waiting: int = 0
    slots: int = 0
    cells_used: int = 0
    cells_cached: int = 0
    cells_total: int = 0
    offload_memory_bytes: int = 0
    offload_disk_bytes: int = 0
    steps_total: int = 0
    step_seconds_total: float = 0.0
    batch_tokens_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    context_shifts_total: int = 0
    preemptions_total: int = 0
    prefix_hits_total: int = 0
    failed_total: int = 0
    evicted_tokens_total: int = 0
    trimmed_tokens_total: int = 0
    loaded_tokens_total: int = 0
    written_tokens_total: int = 0
    drafts: tuple[DraftCounts, ...] = ()
    embedding: EmbeddingCounts = EmbeddingCounts()
