"""The variables that a chat template reads."""

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
    """Not the variables that it sets, nor words of its text; none of an invalid template."""
    assert expected == undeclared_variables(template)
