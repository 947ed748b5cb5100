"""The responses of /v1/models."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class EmbeddingModelMeta(TypedDict):
    """Embedding dimensions of an embedding model."""

    n_embd: NotRequired[int]


class ModelMeta(EmbeddingModelMeta):
    """Properties of the model by llama.cpp's names. An embedding model has no slots."""

    n_params: int
    n_vocab: int
    n_ctx: int
    n_slots: int
    architecture: str
    dtype: str


class Model(TypedDict):
    """One name of a model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    meta: ModelMeta


class ModelList(TypedDict):
    """All names of the models."""

    object: Literal["list"]
    data: list[Model]
