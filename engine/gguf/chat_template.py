"""The chat templates of a GGUF file: the default one, and others by name (tool_use, rag)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf import Keys

from engine.gguf.container import GgufError
from engine.gguf.vocabulary import strings, text_value

_KEYS = Keys.Tokenizer
# The name of the template without a name, in transformers.
_DEFAULT = "default"


def read_chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template, or all of them by name, or None. Raises GgufError for one that is no text."""
    names = strings(metadata, _KEYS.CHAT_TEMPLATES) if _KEYS.CHAT_TEMPLATES in metadata else ()
    named = {name: text_value(metadata, _KEYS.CHAT_TEMPLATE_N.format(name=name)) for name in names}
    default = text_value(metadata, _KEYS.CHAT_TEMPLATE, "")
    if not named:
        return default or None
    if default:
        return {_DEFAULT: default, **named}
    if _DEFAULT not in named:
        raise GgufError(f"its metadata has chat templates by name, but lacks {_KEYS.CHAT_TEMPLATE}")
    return named
