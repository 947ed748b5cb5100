"""Reads the tokenizer of a model from the files of a folder, or from the metadata of a GGUF file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from engine.errors import InvalidRequest, ModelUnsupported
from engine.gguf.container import Metadata, read_metadata
from engine.gguf.tokenizer import read_tokenizer as read_gguf_tokenizer
from engine.load.read.checkpoint import READ_ERRORS, Checkpoint, error_line, is_gguf
from engine.text.regex_limit import RegexLimit, check_repetitions
from engine.text.template_process import TemplateTooCostly, TemplateUnavailable
from engine.text.tokenizer import Tokenizer
from engine.text.variables import syntax_error

# The chat template of a processor, which transformers does not read for the tokenizer alone.
_PROCESSOR_TEMPLATE = "chat_template.json"


def read_tokenizer(path: Path, metadata: Metadata | None = None) -> Any:
    """The tokenizer of a model's folder or GGUF file. Raises GgufError, and the errors of transformers.

    metadata  of the GGUF file if it has been read
    """
    if metadata is None and is_gguf(path):
        metadata = read_metadata(path)
    if metadata is not None:
        return read_gguf_tokenizer(metadata)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    template = path / _PROCESSOR_TEMPLATE
    if template.exists():
        tokenizer.chat_template = json.loads(template.read_text(encoding="utf-8"))["chat_template"]
    return tokenizer


def read_template(name: str, file: str | None) -> str | None:
    """The chat template of a file, in place of the model's own. Raises ModelUnsupported for one with a syntax error."""
    if file is None:
        return None
    try:
        template = Path(file).expanduser().read_text(encoding="utf-8")
    except READ_ERRORS as error:
        raise ModelUnsupported(name, f"the chat template {file} cannot be read: {error_line(error)}") from error
    fault = syntax_error(template)
    if fault is not None:
        raise ModelUnsupported(name, f"the chat template {file} is not valid Jinja: {fault}")
    return template


def read_model_tokenizer(
    name: str, checkpoint: Checkpoint, template: str | None = None, *, vocabulary: int
) -> Tokenizer:
    """The tokenizer without a context limit. Raises ModelUnsupported.

    template  a chat template in place of the model's own
    """
    try:
        # Added tokens are normalised, by a regular expression too.
        with RegexLimit("prompt"):
            tokenizer = read_tokenizer(checkpoint.path, checkpoint.metadata)
        check_repetitions(tokenizer)
        if template is not None:
            tokenizer.chat_template = template
        return Tokenizer(tokenizer, vocabulary_size=vocabulary, context=sys.maxsize)
    except InvalidRequest as error:
        raise ModelUnsupported(name, error.reason) from error
    except (TemplateTooCostly, TemplateUnavailable) as error:
        raise ModelUnsupported(name, f"its chat template {error}") from error
    except Exception as error:
        # The tokenizers library raises Exception itself for an invalid tokenizer.json.
        raise ModelUnsupported(name, f"its tokenizer cannot be read: {error_line(error)}") from error
