"""The check of tool loops finds what breaks them, and the bundled model's template keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.server.template_loop import faults

BUNDLED = Path(__file__).parents[2] / "models" / "target"
CALLS = (
    "{% for call in message.tool_calls or () %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
)
CHAT = "{{ tools | tojson }}{% for message in messages %}<m>{{ message.content }}CALLS</m>{% endfor %}"


def test_the_bundled_template_keeps_tool_loops() -> None:
    """Every conversation is accepted, shown, and read again."""
    assert [] == list(faults(AutoTokenizer.from_pretrained(BUNDLED).chat_template))


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        (CALLS, []),
        ("<tool_call>", ["tools"]),
        ("", ["tools"]),
        (CALLS.replace("call.function.arguments", "{'city': 'Linz'}"), ["read again"]),
        (CALLS + "{% if message.role == 'tool' %}{{ raise_exception('no results') }}{% endif %}", ["one"]),
    ],
)
def test_broken_tool_loops_are_found(calls: str, found: list[str]) -> None:
    """A template that writes no calls, other ones, or takes no results."""
    names = [name for name, _ in faults(CHAT.replace("CALLS", calls))]

    assert set(found) <= set(names)
    assert bool(found) == bool(names)
