"""The responses of /v1/models."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from server.schemas.content import Strict


class AdapterMeta(TypedDict):
    """A LoRA adapter: its largest rank, the kinds of layers it adapts, and the digest and memory of its matrices."""

    rank: int
    targets: list[str]
    digest: str
    bytes: int


class OptionalMeta(TypedDict):
    """Embedding dimensions of an embedding model, the trained context, and the adapter of a name."""

    n_embd: NotRequired[int]
    n_ctx_train: NotRequired[int]
    adapter: NotRequired[AdapterMeta]


class ModelMeta(OptionalMeta):
    """Properties of the model by llama.cpp's names. An embedding model has no slots."""

    n_params: int
    n_vocab: int
    n_ctx: int
    n_slots: int
    architecture: str
    dtype: str


class ModelState(TypedDict):
    """The state of one of several models. `progress` is the phase of a load, `reason` that of the last failure."""

    value: Literal["unloaded", "loading", "loaded", "failed"]
    progress: NotRequired[str]
    reason: NotRequired[str]


class Model(TypedDict):
    """One name of a model, or of an adapter of the model `parent`.

    Only with several models it has a `status`, and a `kind` and `n_ctx_train` of its files. Unless it is loaded, it
    lacks `max_model_len` and the rest of `meta`.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: NotRequired[str]
    max_model_len: NotRequired[int]
    input_modalities: NotRequired[list[Literal["text", "image", "audio"]]]
    meta: NotRequired[ModelMeta | OptionalMeta]
    kind: NotRequired[Literal["chat", "embedding", "rerank"]]
    status: NotRequired[ModelState]


class ModelList(TypedDict):
    """All names of the models."""

    object: Literal["list"]
    data: list[Model]


class ModelCommand(Strict):
    """The model that is loaded or unloaded."""

    model: str
