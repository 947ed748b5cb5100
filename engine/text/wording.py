"""The names that a chat template reads: what a request may tell it besides the messages."""

from __future__ import annotations

import re
from functools import lru_cache

from jinja2 import Environment, TemplateError, meta

# A tag of transformers' own, around what the assistant says; it reads nothing.
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


@lru_cache(maxsize=8)
def undeclared_variables(template: str) -> frozenset[str]:
    """Those that the template takes from outside; none of a template that cannot be read."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template))))
    except TemplateError:
        return frozenset()
