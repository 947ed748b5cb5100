"""The models as /api/tags, /api/ps and /api/show describe them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.types.status import EmbeddingModelInfo, ModelInfo
from server.models.presets import Preset
from server.service import Service

# The model stays loaded: the latest time that clients can parse.
NEVER = "9999-12-31T23:59:59Z"
# Names of llama.cpp for fields of a model's configuration.
_CONFIGURED = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_task = re.compile(r"(For[A-Z]\w*|LMHead\w*|Model)$")


@dataclass(frozen=True, slots=True)
class ModelCards:
    """Cards of the served models and of one owner's presets."""

    service: Service
    presets: Mapping[str, Preset]

    def listed(self) -> list[dict[str, Any]]:
        """Every model under each of its names."""
        return [*self._entries()]

    def running(self) -> list[dict[str, Any]]:
        """The same with memory, context and expiry: all models are loaded at any time."""
        memory, info = self.service.engine.memory, self.service.engine.info
        used = {
            "expires_at": NEVER,
            "size_vram": 0 if info.device == "cpu" else memory.weights_bytes + memory.cache_bytes,
            "context_length": info.context,
        }
        return [{**used, **entry} for entry in self._entries()]

    def shown(self, preset: Preset | None) -> dict[str, Any]:
        """The card of the model, or of a preset of it. Reads the model's configuration: for a worker thread."""
        info, tokenizer = self.service.engine.info, self.service.engine.tokenizer
        chats = tokenizer.has_chat_template
        abilities = {
            "completion": True,
            "insert": tokenizer.fill_in_middle is not None,
            "tools": chats and tokenizer.chat_format.supports_tool_calls,
            "thinking": chats and tokenizer.chat_format.supports_reasoning,
            "vision": "image" in info.input_modalities,
            "audio": "audio" in info.input_modalities,
            "embedding": self.service.embedder is None,
        }
        base = Preset(self.service.settings.model_names[0], "")
        card: dict[str, Any] = {
            "modelfile": (preset or base).modelfile(),
            "parameters": "\n".join((preset or base).parameter_lines()),
            "template": tokenizer.template,
            "details": {**_details(info), "parent_model": (preset or base).parent},
            "model_info": {**_model_info(info), **_configured(info)},
            "capabilities": [name for name, there in abilities.items() if there],
            "modified_at": preset.created_at if preset else self._modified(),
        }
        return card | shown_texts(preset)

    def shown_embedding(self, embedding: EmbeddingModelInfo) -> dict[str, Any]:
        """The card of the embedding model."""
        info = embedding.model
        length = {f"{_family(info)}.embedding_length": embedding.dimensions}
        return {
            "modelfile": f"FROM {self.service.settings.embedding_name}\n",
            "parameters": "",
            "template": "",
            "details": _details(info),
            "model_info": {**_model_info(info), **length},
            "capabilities": ["embedding"] if embedding.output_kind == "vectors" else [],
            "modified_at": self._modified(),
        }

    def _entries(self) -> Iterator[dict[str, Any]]:
        service = self.service
        info, embedding, size = service.engine.info, service.engine.embedding, service.engine.memory.weights_bytes
        for name in service.settings.model_names:
            yield self._entry(name, info, size)
        for adapter in info.adapters:
            entry = self._entry(adapter.name, info, adapter.bytes)
            details = {**entry["details"], "parent_model": service.settings.model_names[0]}
            yield {**entry, "digest": adapter.digest, "details": details}
        for name, preset in self.presets.items():
            entry = self._entry(name, info, size)
            details = {**entry["details"], "parent_model": preset.parent}
            yield {**entry, "modified_at": preset.created_at, "details": details}
        if embedding is not None and service.settings.embedding_name is not None:
            size, model = embedding.weights_bytes, embedding.model
            more = {"size_vram": 0 if model.device == "cpu" else size, "context_length": model.context}
            yield {**self._entry(service.settings.embedding_name, model, size), **more}

    def _entry(self, name: str, info: ModelInfo, size: int) -> dict[str, Any]:
        return {
            "name": name,
            "model": name,
            "modified_at": self._modified(),
            "size": size,
            "digest": info.fingerprint,
            "details": _details(info),
        }

    def _modified(self) -> str:
        return datetime.fromtimestamp(self.service.created, UTC).isoformat().replace("+00:00", "Z")


def shown_texts(preset: Preset | None) -> dict[str, Any]:
    """The texts of a preset in a card."""
    texts: dict[str, Any] = {}
    if preset and preset.system:
        texts["system"] = preset.system
    if preset and preset.messages:
        texts["messages"] = [message.model_dump(exclude_none=True) for message in preset.messages]
    if preset and preset.license:
        texts["license"] = "\n".join(preset.license)
    return texts


def _details(info: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf" if info.folder.lower().endswith(".gguf") else "safetensors",
        "family": _family(info),
        "families": [_family(info)],
        "parameter_size": _parameter_size(info.parameters),
        "quantization_level": info.dtype,
    }


def _model_info(info: ModelInfo) -> dict[str, Any]:
    return {
        "general.architecture": _family(info),
        "general.basename": info.name.rstrip("/").rpartition("/")[2].removesuffix(".gguf"),
        "general.parameter_count": info.parameters,
        f"{_family(info)}.context_length": info.context,
        f"{_family(info)}.vocab_size": info.vocabulary,
    }


def _configured(info: ModelInfo) -> dict[str, Any]:
    """Dimensions from the configuration file of the model's folder; a GGUF file has none."""
    with suppress(OSError, ValueError):
        config = json.loads((Path(info.folder) / "config.json").read_text())
        config = config.get("text_config", config)
        return {f"{_family(info)}.{name}": config[field] for field, name in _CONFIGURED.items() if field in config}
    return {}


def _family(info: ModelInfo) -> str:
    """The architecture in Ollama's format: "qwen2" for Qwen2ForCausalLM."""
    return _task.sub("", info.architecture).lower() or info.architecture


def _parameter_size(parameters: int) -> str:
    """A count in Ollama's format: 7.6B, 134.52M, 12.3K."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.1f}{letter}" if letter == "B" else f"{parameters / size:.2f}{letter}"
    return str(parameters)
