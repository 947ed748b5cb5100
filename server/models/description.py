"""What the files of a model say about it before it is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.gguf.tower_files import tower_files
from engine.types.content import ContentKind
from server.models.entry import ModelEntry

DescribedKind = Literal["chat", "embedding", "rerank"]
# A file by its name, size and time of change.
FileState = tuple[str, int, int]

_CONFIG, _TEMPLATE, _TOKENIZER = "config.json", "chat_template.jinja", "tokenizer_config.json"
# Names of the longest text in configurations of transformers.
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions")
_ENCODER_FIELDS: tuple[tuple[str, ContentKind], ...] = (("vision_config", "image"), ("audio_config", "audio"))


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model by its files. A load may refuse it, or not read images.

    family            as `model_type` or `general.architecture`, such as "llama"
    format            of the weights
    input_modalities  kinds of content in prompts
    context           of the training, in tokens; None: unknown
    template          its chat template; empty: none
    """

    kind: DescribedKind
    family: str
    format: Literal["gguf", "safetensors"]
    input_modalities: tuple[Literal["text"] | ContentKind, ...] = ("text",)
    context: int | None = None
    template: str = ""


class Descriptions:
    """Descriptions of models, which are read again when their files change."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[tuple[FileState, ...], ModelDescription | None]] = {}

    def read(self, entries: Iterable[ModelEntry]) -> dict[str, ModelDescription]:
        """The descriptions of models by their main names, without those that are not local or not readable.

        It reads files: for a worker thread.
        """
        described = {entry.name: self._of(entry) for entry in entries}
        return {name: description for name, description in described.items() if description is not None}

    def _of(self, entry: ModelEntry) -> ModelDescription | None:
        path = Path(entry.source or "").expanduser()
        if entry.source is None or not path.exists():
            return None
        states = tuple(_states(path))
        known = self._read.get(entry.source)
        if known is None or known[0] != states:
            description = None
            with suppress(OSError, ValueError, TypeError, AttributeError):
                description = _folder(path) if path.is_dir() else _gguf(path)
            known = self._read[entry.source] = states, description
        return known[1]


def _states(path: Path) -> Iterator[FileState]:
    """The files that are read for a description."""
    if path.is_dir():
        files = [path / name for name in (_CONFIG, "modules.json", _TEMPLATE, _TOKENIZER)]
    else:
        files = [path, *tower_files(path)]
    for file in files:
        with suppress(OSError):
            stat = file.stat()
            yield file.name, stat.st_size, stat.st_mtime_ns


def _folder(path: Path) -> ModelDescription:
    """The model of a folder in transformers' layout. Raises OSError, and errors of a damaged configuration."""
    config = json.loads((path / _CONFIG).read_bytes())
    text = config.get("text_config") or config
    lengths = (text.get(field) for field in _CONTEXT_FIELDS)
    kind: DescribedKind = "chat"
    if any("ForSequenceClassification" in name for name in config.get("architectures") or ()):
        kind = "rerank"
    elif (path / "modules.json").is_file():
        kind = "embedding"
    return ModelDescription(
        kind,
        family=str(config.get("model_type", "")),
        format="safetensors",
        input_modalities=("text", *(kind for field, kind in _ENCODER_FIELDS if config.get(field))),
        context=next((length for length in lengths if isinstance(length, int)), None),
        template=_template(path),
    )


def _template(path: Path) -> str:
    file = path / _TEMPLATE
    if file.is_file():
        return file.read_text()
    with suppress(OSError, ValueError):
        template: Any = json.loads((path / _TOKENIZER).read_bytes()).get("chat_template")
        return template if isinstance(template, str) else ""
    return ""


def _gguf(path: Path) -> ModelDescription:
    """The model of a GGUF file, with the vision tower beside it. Raises OSError and GgufError."""
    # A second: only servers with such files import it.
    from engine.gguf.container import read_metadata

    metadata = read_metadata(path)
    family = metadata.text("general.architecture")
    width = metadata.get(f"{family}.embedding_length")
    has_tower = False
    for file in tower_files(path):
        with suppress(OSError, ValueError):
            has_tower |= read_metadata(file).get("clip.vision.projection_dim") == width is not None
    context = metadata.get(f"{family}.context_length")
    return ModelDescription(
        "chat",
        family=family,
        format="gguf",
        input_modalities=("text", "image") if has_tower else ("text",),
        context=context if isinstance(context, int) else None,
        template=metadata.text("tokenizer.chat_template", ""),
    )
