"""Status of the engine: the model, its memory, the drafters, and counters after each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.types.content import ContentKind
from engine.types.speech import SpeechInfo

# How embedding vectors are compared, as sentence-transformers names it.
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]


@dataclass(frozen=True, slots=True)
class QuantizationEstimate:
    """The weight bytes read for a token in each quantisation format.

    relative_bytes  (format, bytes relative to the current weights)
    auto            the format that `auto` selects; None: none
    """

    relative_bytes: tuple[tuple[str, float], ...]
    auto: str | None


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded LoRA adapter.

    name     in requests
    digest   of its files
    rank     the largest of its layers
    targets  the last parts of the names of its layers
    bytes    of its matrices in memory
    """

    name: str
    digest: str
    rank: int
    targets: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The loaded model. `name` is the one of the settings, `folder` the source of the files.

    max_context              context length that the model and the memory allow with other settings
    decoder_start_tokens     leading prompt tokens of an encoder-decoder model; else empty
    tensor_parallel          processes that divide it
    batch_invariant          logits are bit for bit the same in any batch, with any chunks and cached prefix; else equal
                             up to rounding
    not_native_reason        why steps run in torch operations; None: each is one call of the C++ library
    kernel_variants          of the native step and of its products with quantised weights; empty without it
    adapters                 LoRA adapters that requests can name
    quantization_estimate    None: the weights are quantised, or cannot be
    input_modalities         kinds of content in prompts ("text", "image", "audio")
    unread_modalities        further inputs of the model ("image", "video", "audio")
    text_only_reason         why images and audio are unread; empty: they are read, or it has no such inputs
    speech                   how it transcribes; None: it does not
    default_max_tokens       of answers whose request has no limit (max_new_tokens of the generation configuration);
                             None: the context
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
    tensor_parallel: int = 1
    batch_invariant: bool = False
    not_native_reason: str | None = None
    kernel_variants: tuple[str, ...] = ()
    adapters: tuple[AdapterInfo, ...] = ()
    quantization_estimate: QuantizationEstimate | None = None
    input_modalities: tuple[Literal["text"] | ContentKind, ...] = ("text",)
    unread_modalities: tuple[str, ...] = ()
    text_only_reason: str = ""
    speech: SpeechInfo | None = None
    default_max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Use of the memory. The cache is allocated once, at the start.

    weights_bytes    of the model as loaded
    cells            tokens in the cache
    cell_bytes       one token's keys and values in every layer with full attention
    window_bytes     cells of layers with a window or chunk; independent of the context length
    cache_bytes      cells x cell_bytes + window_bytes
    workspace_bytes  upper estimate of the temporary memory of one step
    available_bytes  free memory of the machine before the model was loaded
    """

    weights_bytes: int
    cells: int
    cell_bytes: int
    cache_bytes: int
    workspace_bytes: int
    available_bytes: int
    window_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The planned memory of a model in a process of its own, and the sizes of its cache.

    bytes  of the whole process
    cells  tokens in the cache
    """

    bytes: int
    context: int
    slots: int
    cells: int


@dataclass(frozen=True, slots=True)
class DraftingInfo:
    """The kinds of drafters, and the draft model with its memory, if there is one."""

    kinds: tuple[str, ...] = ()
    model: ModelInfo | None = None
    memory: MemoryPlan | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingModelInfo:
    """The embedding model.

    model            its `context` is the longest text in tokens; it has no slots
    output_kind      vectors of texts, or scores of pairs of texts
    dimensions       of a vector
    prompts          names of the model's prompts for queries, documents, ...
    similarity       how two vectors are compared
    weights_bytes    of the model as loaded
    workspace_bytes  temporary memory of a batch
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
    """Texts in the queue of the embedding model, and totals since the start."""

    waiting: int = 0
    texts_total: int = 0
    tokens_total: int = 0
    batches_total: int = 0
    seconds_total: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafted and accepted tokens of one kind of drafter, by position in the draft."""

    kind: str
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncoderCounts:
    """Entries of images or sounds that sequences needed: encoded, or in the encoder cache.

    encodings_total  complete ones
    seconds_total    in the encoder
    """

    kind: ContentKind
    encodings_total: int = 0
    seconds_total: float = 0.0
    memory_hits_total: int = 0
    disk_hits_total: int = 0


# Upper bounds of the batch tokens of a forward pass, for statistics.
BATCH_BUCKETS = tuple(2**power for power in range(13))


@dataclass(frozen=True, slots=True)
class Stats:
    """State of the engine after its latest step. Totals count since the start.

    free_place_seconds    predicted time until a request ends and a place in the queue is free
    cells_used            cells of running sequences
    cells_cached          cells of cached prefixes alone: evicted for running sequences
    host_cache_bytes      of evicted prefixes in host memory
    disk_cache_bytes      of cached prefixes in files
    adapters              LoRA adapters that requests can name
    adapter_bytes         of all adapters in memory, also of unloaded ones that running requests use
    prefix_hits_total     finished requests with a cached prefix
    evicted_tokens_total, trimmed_tokens_total, loaded_tokens_total, written_tokens_total  see PrefixCounts (kvcache)
    batch_sizes           forward passes by batch tokens: up to each of BATCH_BUCKETS, and above
    """

    running: int = 0
    waiting: int = 0
    slots: int = 0
    free_place_seconds: float = 0.0
    cells_used: int = 0
    cells_cached: int = 0
    cells_total: int = 0
    host_cache_bytes: int = 0
    disk_cache_bytes: int = 0
    adapters: int = 0
    adapter_bytes: int = 0
    steps_total: int = 0
    step_seconds_total: float = 0.0
    batch_tokens_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    context_shifts_total: int = 0
    preemptions_total: int = 0
    time_slices_total: int = 0
    prefix_hits_total: int = 0
    failed_total: int = 0
    evicted_tokens_total: int = 0
    trimmed_tokens_total: int = 0
    loaded_tokens_total: int = 0
    written_tokens_total: int = 0
    batch_sizes: tuple[int, ...] = (0,) * (len(BATCH_BUCKETS) + 1)
    drafts: tuple[DraftCounts, ...] = ()
    encoders: tuple[EncoderCounts, ...] = ()
    embedding: EmbeddingCounts = EmbeddingCounts()
