"""The responses of /server_info, /model_info and the render routes, which routers read."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict


class WorkerModel(TypedDict):
    """The model of a worker, by the names of SGLang.

    model_path      the main name of the model in requests
    tokenizer_path  the same; null: a router loads no tokenizer
    """

    model_path: str
    tokenizer_path: None
    is_generation: Literal[True]
    weight_version: str
    model_type: str
    architectures: list[str]
    has_image_understanding: bool
    has_audio_understanding: bool


class BlockConfig(TypedDict):
    """The cache in blocks. The cache itself is exact to the token."""

    block_size: int
    num_gpu_blocks: int


class NamedModel(TypedDict):
    """The main name of the model."""

    model: str
    max_model_len: int


class WorkerConfig(TypedDict):
    """The part of vLLM's configuration that routers read."""

    model_config: NamedModel
    cache_config: BlockConfig


class WorkerInfo(TypedDict):
    """A worker, by the names of SGLang; `vllm_config` by those of vLLM.

    max_total_num_tokens  tokens in the KV cache
    max_running_requests  slots
    max_req_input_len     context of one sequence in tokens
    """

    version: str
    model_path: str
    served_model_name: str
    status: str
    tp_size: int
    dp_size: Literal[1]
    max_total_num_tokens: int
    max_running_requests: int
    max_req_input_len: int
    vllm_config: WorkerConfig


class RenderedRequest(TypedDict):
    """The prompt tokens of a request, as in vLLM. `features` are of media, which no request has."""

    request_id: str
    model: str
    token_ids: list[int]
    features: None
    cache_salt: str | None
