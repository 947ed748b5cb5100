"""The entries of several models: from the command line, a folder of models and sections of the configuration file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from server.configuration.settings import ANY_NAME, Settings, model_name
from server.models.entry import ModelEntry, ModelKind

# Settings that are of one model, with their flags.
_OF_ONE_MODEL = {
    "lora": "--lora",
    "lora_dir": "--lora-dir",
    "draft_model": "--draft-model",
    "chat_template": "--chat-template",
}
# Context of the bundled model in the engine of an embedding model, in tokens: no request reaches it.
_UNUSED_CONTEXT = 512
_shard = re.compile(r"-(\d{5})-of-\d{5}$")
# GGUF files without a language model: vision projectors, importance matrices.
_side_file = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)


def serves_several(settings: Settings, sources: Sequence[str], sections: Mapping[str, Settings]) -> bool:
    """Whether models are loaded on demand: else the only one is loaded into the process of the server."""
    return len(sources) > 1 or bool(settings.models_dir or sections)


def configured_entries(
    settings: Settings, sources: Sequence[str], sections: Mapping[str, Settings]
) -> tuple[ModelEntry, ...]:
    """All models, those of the command line first; the first one is loaded at the start.

    sections  settings of models by name. Raises ValueError for settings that cannot work.
    """
    for field, flag in _OF_ONE_MODEL.items():
        if getattr(settings, field):
            raise ValueError(f"{flag} is of one model: with several, write it below [models.NAME] in cellar.toml")
    if set(settings.served_names) - {ANY_NAME}:
        raise ValueError("--served-model-name is of one model: with several, name them by [models.NAME] in cellar.toml")
    entries = [*_entries(settings, sources, sections)]
    names = {name for entry in entries for name in (entry.name, *entry.aliases)}
    for name in settings.pinned:
        if name not in names:
            raise ValueError(f"--pin {name} is no model; there are {', '.join(sorted(names))}")
    if not entries:
        raise ValueError(f"--models {settings.models_dir} has no models: folders with config.json, or GGUF files")
    if sources:
        entries[0] = replace(entries[0], preloads=True)
    return tuple(entries)


def folder_entries(settings: Settings) -> Iterator[ModelEntry]:
    """The models of the folder of models, by name. Raises OSError, and ValueError for settings that cannot work."""
    if settings.models_dir is None:
        return
    folder = Path(settings.models_dir).expanduser()
    for path in sorted(folder.iterdir()):
        name = _name_in_folder(path)
        if name is not None:
            yield replace(_entry(name, str(path), settings), scanned=True)


def _entries(settings: Settings, sources: Sequence[str], sections: Mapping[str, Settings]) -> Iterator[ModelEntry]:
    for source in sources:
        if source not in sections:
            yield _entry(model_name(source), source, settings)
    for name in sorted(sections, key=lambda name: sources.index(name) if name in sources else len(sources)):
        section = sections[name]
        kind: ModelKind = "generate" if section.embedding_model is None else "embedding"
        yield _complete(ModelEntry(name, section, section.served_names, kind), settings.pinned)
    if settings.embedding_model:
        yield _entry(model_name(settings.embedding_model), settings.embedding_model, settings, kind="embedding")
    yield from folder_entries(settings)


def _entry(name: str, source: str, settings: Settings, kind: ModelKind | None = None) -> ModelEntry:
    kind = kind or _kind(Path(source).expanduser())
    if kind == "embedding":
        entry = ModelEntry(name, replace(settings, embedding_model=source), kind=kind)
    else:
        entry = ModelEntry(name, replace(settings, model=source, embedding_model=None))
    return _complete(entry, settings.pinned)


def _complete(entry: ModelEntry, pinned: Sequence[str]) -> ModelEntry:
    """The entry with its names and those of its adapters, and a disk cache for itself.

    pinned  names of pinned models
    """
    settings = replace(entry.settings, served_names=(entry.name, *entry.aliases), models_dir=None, pinned=())
    if settings.disk_cache_folder is not None:
        settings = replace(settings, disk_cache=str(Path(settings.disk_cache_folder) / entry.name))
    if entry.kind == "embedding":
        # Its engine also has the small bundled model, which no request can name, with the smallest cache.
        settings = replace(settings, model=None, served_names=(f"{entry.name}-generator",), drafter="none")
        settings = replace(settings, context=_UNUSED_CONTEXT, slots=settings.slots or 1)
    settings.check()
    aliases = (*entry.aliases, *settings.adapters)
    return replace(entry, settings=settings, aliases=aliases, pinned=not {entry.name, *aliases}.isdisjoint(pinned))


def _name_in_folder(path: Path) -> str | None:
    """The name of a model; None if the path is no model, or not the first of its files."""
    if path.is_dir():
        return path.name if (path / "config.json").is_file() else None
    if path.suffix.lower() != ".gguf" or _side_file.search(path.stem):
        return None
    shard = _shard.search(path.stem)
    if shard is not None and int(shard[1]) != 1:
        return None
    return _shard.sub("", path.stem)


def _kind(path: Path) -> ModelKind:
    """Folders of sentence-transformers, and classifiers of pairs of texts, are embedding models."""
    if (path / "modules.json").is_file():
        return "embedding"
    try:
        architectures: Iterable[str] = json.loads((path / "config.json").read_bytes()).get("architectures") or ()
        return "embedding" if any("ForSequenceClassification" in name for name in architectures) else "generate"
    except (OSError, ValueError, AttributeError, TypeError):
        return "generate"
