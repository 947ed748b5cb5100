"""The chat templates of a GGUF file: the default one, and others by name (tool_use, rag)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf import Keys

from engine.gguf.vocabulary import strings, text_value

_KEYS = Keys.Tokenizer
_NAMED = _KEYS.CHAT_TEMPLATE_N.format(name="")
# The name of the template without a name, in transformers.
_DEFAULT = "default"
# The named one for requests with tools; llama.cpp takes it for all requests in a file without a default.
_TOOL_USE = "tool_use"


def read_chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template, or all of them by name, or None. Raises GgufError for one that is not a text.

    Without a default one, that is `tool_use`, else the first by name.
    """
    listed = strings(metadata, _KEYS.CHAT_TEMPLATES) if _KEYS.CHAT_TEMPLATES in metadata else ()
    names = [*listed, *(key.removeprefix(_NAMED) for key in metadata if key.startswith(_NAMED))]
    named = {name: text_value(metadata, _NAMED + name) for name in names}
    default = text_value(metadata, _KEYS.CHAT_TEMPLATE, "")
    if not named:
        return default or None
    return {_DEFAULT: default or named.get(_TOOL_USE) or next(iter(named.values())), **named}
