"""Several models as /api/tags and /api/ps list them: loaded ones with their details, others by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from server.models.description import ModelDescription
from server.models.entry import ModelEntry
from server.models.presets import Preset
from server.models.several import SeveralModels
from server.ollama.model_cards import NEVER, ModelCards, shown_texts

_UNKNOWN = {"format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}


def all_cards(
    models: SeveralModels, presets: Mapping[str, Preset], files: Mapping[str, ModelDescription]
) -> Iterator[dict[str, Any]]:
    """Every model under each of its names, then the presets.

    files  descriptions by main name
    """
    for name in models.all_names:
        yield _card(models, name, files)
    for name, preset in presets.items():
        if preset.base not in models.all_names:
            continue
        card = _card(models, preset.base, files)
        details = {**card["details"], "parent_model": preset.parent}
        yield {**card, "name": name, "model": name, "modified_at": preset.created_at, "details": details}


def loaded_cards(models: SeveralModels) -> Iterator[dict[str, Any]]:
    """The loaded models, with the memory of their processes and the time of their unload."""
    for name in models.loaded_names:
        entry = models.entries[name]
        status, engine = models.loader.status(entry.name), models.loader.engine(entry.name)
        if name != entry.name or engine is None or not engine.ready:
            continue
        info = engine.info
        expires = NEVER
        if status.expires_in is not None:
            expires = _text(datetime.now(UTC) + timedelta(seconds=status.expires_in))
        yield {
            **_card(models, name, {}),
            "size": status.memory_bytes,
            "size_vram": 0 if info.device == "cpu" else status.memory_bytes,
            "context_length": info.context,
            "expires_at": expires,
        }


def _card(models: SeveralModels, name: str, files: Mapping[str, ModelDescription]) -> dict[str, Any]:
    """A model in any state; never loads it."""
    entry = models.entries[name]
    engine = models.loader.engine(entry.name)
    if engine is not None and engine.ready:
        cards = ModelCards(models.service(entry, name, engine), {}).listed()
        card = next((card for card in cards if card["name"] == name), cards[0])
        return {**card, "name": name, "model": name}
    return {
        "name": name,
        "model": name,
        "modified_at": _text(datetime.fromtimestamp(models.created, UTC)),
        "size": _file_bytes(entry.source),
        "digest": "",
        "details": _details(files.get(entry.name)),
    }


def unloaded_card(
    models: SeveralModels, entry: ModelEntry, description: ModelDescription | None, preset: Preset | None
) -> dict[str, Any]:
    """A model as /api/show describes it before it is loaded; abilities of its chat template by the words in it."""
    shown = preset or Preset(entry.name, "")
    template = "" if description is None else description.template
    abilities = {
        "completion": entry.kind == "generate",
        "tools": "tools" in template,
        "thinking": "<think>" in template or "enable_thinking" in template,
        "vision": description is not None and "image" in description.input_modalities,
        "audio": description is not None and "audio" in description.input_modalities,
        "embedding": description is not None and description.kind == "embedding",
    }
    info: dict[str, Any] = {}
    if description is not None:
        info = {"general.architecture": description.family, "general.basename": entry.name}
        if description.context is not None:
            info[f"{description.family}.context_length"] = description.context
    return {
        "modelfile": shown.modelfile(),
        "parameters": "\n".join(shown.parameter_lines()),
        "template": template,
        "details": {**_details(description), "parent_model": shown.parent},
        "model_info": info,
        "capabilities": [name for name, there in abilities.items() if there],
        "modified_at": preset.created_at if preset else _text(datetime.fromtimestamp(models.created, UTC)),
        **shown_texts(preset),
    }


def _details(description: ModelDescription | None) -> dict[str, Any]:
    details = {"parent_model": "", **_UNKNOWN}
    if description is not None:
        details |= {"format": description.format, "family": description.family, "families": [description.family]}
    return details


def _file_bytes(source: str | None) -> int:
    """Of a local model; 0 for others."""
    path = Path(source or "").expanduser()
    if source is None or not path.exists():
        return 0
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def _text(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")
