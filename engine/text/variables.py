"""The variables that a chat template reads, and values of some. A separate module, which imports no transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta

# `datetime` of the FireFunction template; without the time of day, so that prompts of a day share a prefix.
_DATE = "%Y-%m-%d"
# `date_string` of Llama's templates, which have a date of 2024 by default.
_DATE_STRING = "%d %b %Y"
# A tag of transformers around the text of the assistant; it reads no variable.
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


@lru_cache(maxsize=8)
def undeclared_variables(template: str) -> frozenset[str]:
    """Names that the template reads but does not define.

    None for a template with a syntax error, or that nests too deep. It evaluates constant expressions of the template.
    """
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template))))
    except (TemplateError, RecursionError):
        return frozenset()


def syntax_error(template: str) -> str | None:
    """Line and reason of a template's first syntax error; None for a template without one. Nothing is evaluated."""
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except RecursionError:
        return "it nests too deep"
    return None


def template_variables(names: Iterable[str], tools: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Values for `names` that transformers does not provide: the tools as JSON or as a list, and the date."""
    functions = [tool["function"] for tool in tools]
    text = json.dumps(functions, indent=4, ensure_ascii=False)
    now = datetime.now()
    values: dict[str, object] = {
        "functions": text,
        "xml_tools": functions,
        "datetime": now.strftime(_DATE),
        "date_string": now.strftime(_DATE_STRING),
    }
    return {name: value for name, value in values.items() if name in names}
