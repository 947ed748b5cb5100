"""What a chat template reads from outside: the names that a request may give a value to."""

from __future__ import annotations

import pytest

from engine.text.variables import undeclared_variables


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", set()),
        ("{{ a }}{% if b is defined %}{{ c.d }}{% endif %}", {"a", "b", "c"}),
        ("{% set a = 1 %}{{ a }}{% for b in c %}{{ b }}{% endfor %}", {"c"}),
        ("{% macro say(a) %}{{ a }}{% endmacro %}{{ say(b) }}", {"b"}),
        ("{% for a in b %}{% if a %}{% continue %}{% endif %}{% endfor %}", {"b"}),
        ("{%- generation -%}{{ a }}{%- endgeneration %}", {"a"}),
        ("no thinking in a word of prose", set()),
        ("{% if %}", set()),
    ],
)
def test_undeclared_variables_of_a_template(template: str, expected: set[str]) -> None:
    """What a template sets itself is none, nor is a word of its text; a broken template has none."""
    assert expected == undeclared_variables(template)
