"""Bodies of the calls that load and unload LoRA adapters, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from server.schemas.content import Strict

_Name = Annotated[str, Field(min_length=1, max_length=512)]


class LoadAdapterRequest(Strict):
    """POST /v1/load_lora_adapter. `load_inplace`: in place of a loaded adapter with the name."""

    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool | None = None


class UnloadAdapterRequest(Strict):
    """POST /v1/unload_lora_adapter. `lora_int_id` has no effect: adapters are known by name."""

    lora_name: _Name
    lora_int_id: int | None = None


class LlamaAdapter(TypedDict):
    """An adapter as llama.cpp lists it. Requests choose it as their model, so no scale applies to all of them."""

    id: int
    path: str
    scale: float
