"""The folder with the files of a model's processor; for a GGUF file, they are written to the user's cache folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from shutil import rmtree
from typing import Any

from engine.errors import ModelUnsupported
from engine.gguf.projectors.projector import ProcessorFiles
from engine.gguf.tokenizer import read_tokenizer
from engine.kernels.cache_folder import cache_folder, make_private, mark_used, scratch_folder
from engine.load.read.checkpoint import READ_ERRORS, Checkpoint, error_line

# Of the written files.
_VERSION = 1
_FILES = ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def processor_folder(name: str, checkpoint: Checkpoint) -> Path:
    """The folder of a checkpoint, or one that is made for its GGUF files. Raises ModelUnsupported."""
    if checkpoint.tower is None or checkpoint.metadata is None:
        return checkpoint.path
    try:
        files = checkpoint.tower.processor()
        digest = hashlib.sha256(checkpoint.configuration + repr((_VERSION, files)).encode()).hexdigest()[:16]
        folder = cache_folder("processors") / digest
        if not all((folder / file).is_file() for file in _FILES):
            rmtree(folder, ignore_errors=True)
            _write(folder, files, read_tokenizer(checkpoint.metadata))
        for file in _FILES:
            mark_used(folder / file)
        return folder
    except READ_ERRORS as error:
        raise ModelUnsupported(name, f"its processor cannot be made: {error_line(error)}") from error


def _write(folder: Path, files: ProcessorFiles, tokenizer: Any) -> None:
    make_private(folder.parent)
    with scratch_folder(folder.parent) as scratch:
        tokenizer.chat_template = None
        tokenizer.save_pretrained(scratch / folder.name)
        tokens = scratch / folder.name / "tokenizer_config.json"
        _write_json(tokens, json.loads(tokens.read_text()) | {"extra_special_tokens": dict(files.named_tokens)})
        _write_json(
            tokens.with_name("processor_config.json"), {"processor_class": files.processor_class, **files.settings}
        )
        image = {"image_processor_type": files.image_processor, **files.image_settings}
        _write_json(tokens.with_name("preprocessor_config.json"), image)
        try:
            (scratch / folder.name).rename(folder)
        except OSError:
            # Another process has made it meanwhile.
            if not folder.is_dir():
                raise


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")
