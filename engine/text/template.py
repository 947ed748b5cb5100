"""The jinja environment of a chat template, and the values of its variables.

transformers caches a sandboxed environment for each template; it is extended by features that templates expect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, Undefined
from jinja2.sandbox import SandboxedEnvironment
from transformers.utils import chat_template_utils

# `datetime` of the FireFunction template; without the time of day, so that prompts of a day share a prefix.
_DATE = "%Y-%m-%d"
# A template that tests whether a message has content.
_CONTENT = re.compile(r"content(?:'\]|\"\])? is none")


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
    environment.is_safe_attribute = lambda *found: SandboxedEnvironment.is_safe_attribute(environment, *found)
    if _CONTENT.search(template):
        # transformers omits fields that are None.
        environment.tests["none"] = lambda value: value is None or isinstance(value, Undefined)


def template_variables(names: Iterable[str], tools: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Values for `names` that transformers does not provide: the tools as JSON or as a list, and the date."""
    functions = [tool["function"] for tool in tools]
    text = json.dumps(functions, indent=4, ensure_ascii=False)
    values: dict[str, object] = {"functions": text, "xml_tools": functions, "datetime": datetime.now().strftime(_DATE)}
    return {name: value for name, value in values.items() if name in names}


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
