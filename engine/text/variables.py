"""The variables that a chat template reads. A module of its own: it imports no transformers."""

from __future__ import annotations

import re
from functools import lru_cache

from jinja2 import Environment, TemplateError, meta

# A tag of transformers around the text of the assistant; it reads no variable.
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


@lru_cache(maxsize=8)
def undeclared_variables(template: str) -> frozenset[str]:
    """Names that the template reads but does not define; none for a template with a syntax error."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template))))
    except TemplateError:
        return frozenset()
