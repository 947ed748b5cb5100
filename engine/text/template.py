"""The jinja environment of a chat template, and a rendering in it; only the subprocess that renders imports this.

transformers caches a sandboxed environment for each template; it is extended by features that templates expect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, Undefined
from jinja2.sandbox import SandboxedEnvironment
from transformers.utils import chat_template_utils

# A template that tests whether a message has content.
_CONTENT = re.compile(r"content(?:'\]|\"\])? is none")


@lru_cache(maxsize=128)
def extend_environment(template: str) -> None:
    """Let a template change its lists, write iterators as JSON and parse JSON.

    A template with a syntax error is left unchanged: it fails when it is rendered.
    """
    try:
        environment = chat_template_utils._compile_jinja_template(template).environment
    except TemplateError:
        return
    environment.filters["tojson"] = _to_json
    environment.filters["from_json"] = json.loads
    environment.is_safe_attribute = lambda *arguments: SandboxedEnvironment.is_safe_attribute(environment, *arguments)
    if _CONTENT.search(template):
        # transformers omits fields that are None.
        environment.tests["none"] = lambda value: value is None or isinstance(value, Undefined)


def render(template: str, messages: list[dict[str, object]], options: dict[str, Any]) -> str:
    """The text of a conversation. Raises whatever the template does."""
    rendered, _ = chat_template_utils.render_jinja_template(conversations=[messages], chat_template=template, **options)
    return str(rendered[0])


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it, with iterators as lists."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_to_list
    )


def _to_list(value: object) -> object:
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
