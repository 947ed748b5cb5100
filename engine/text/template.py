"""The environment in which transformers runs a chat template, with what templates expect of other servers'.

It stays a sandbox. transformers keeps one environment for each template, and that one is completed here.
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

# What fireworks' template reads as the time; a day keeps prompts alike.
_DATE = "%Y-%m-%d"
# A template that asks whether a message has content at all.
_CONTENT = re.compile(r"content(?:'\]|\"\])? is none")


def extend_environment(template: str) -> None:
    """Let a template change lists, of which transformers gives it its own, write what is listed lazily, and read JSON.

    Nothing is done about a template that cannot be read: rendering says what is wrong with it.
    """
    try:
        environment = chat_template_utils._compile_jinja_template(template).environment
    except TemplateError:
        return
    environment.filters["tojson"] = _to_json
    environment.filters["from_json"] = json.loads
    environment.is_safe_attribute = lambda *found: SandboxedEnvironment.is_safe_attribute(environment, *found)
    if _CONTENT.search(template):
        # transformers leaves out what is None.
        environment.tests["none"] = lambda value: value is None or isinstance(value, Undefined)


def template_variables(names: Iterable[str], tools: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """What a template reads by names that transformers does not give: the tools, as JSON or one by one, and the day."""
    functions = [tool["function"] for tool in tools]
    text = json.dumps(functions, indent=4, ensure_ascii=False)
    found: dict[str, object] = {"functions": text, "xml_tools": functions, "datetime": datetime.now().strftime(_DATE)}
    return {name: value for name, value in found.items() if name in names}


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers writes JSON; what a filter makes item by item is a list."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_to_list
    )


def _to_list(value: object) -> object:
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
