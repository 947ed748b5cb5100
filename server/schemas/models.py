"""The answers of /v1/models."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class ModelMore(TypedDict):
    """What else there is to say of an embedding model: the length of its vectors."""

    n_embd: NotRequired[int]


class ModelMeta(ModelMore):
    """What the model is, under llama.cpp's names. An embedding model has no slots."""

    n_params: int
    n_vocab: int
    n_ctx: int
    n_slots: int
    architecture: str
    dtype: str


class Model(TypedDict):
    """One name that the model answers to."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    meta: ModelMeta


class ModelList(TypedDict):
    """All names that the model answers to."""

    object: Literal["list"]
    data: list[Model]
