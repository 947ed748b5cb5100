"""A chat template from a file: the start ends with a sentence if it cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ModelUnsupported
from engine.load.load import load
from engine.load.read.tokenizer_files import read_template, read_tokenizer
from tests.engine.kit.models import save_tokenizer


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", "line 2"),
        ("{% for m in messages %}{{ m.content }}", "endfor"),
        ("{% nothing %}", "nothing"),
    ],
)
def test_a_syntax_error_is_named_with_its_line(template: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(template)

    with pytest.raises(ModelUnsupported, match="is not valid Jinja: line") as refused:
        read_template("some", str(file))
    assert reason in str(refused.value)


def test_tags_of_published_templates_are_accepted(tmp_path: Path) -> None:
    """Those of transformers around the answer, and loop controls."""
    file = tmp_path / "chat.jinja"
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% continue %}{% endfor %}"
    file.write_text(text)

    assert text == read_template("some", str(file))
    assert read_template("some", None) is None


def test_the_template_of_a_processor_precedes_that_of_the_tokenizer(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    before = read_tokenizer(tmp_path).chat_template

    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')

    assert read_tokenizer(tmp_path).chat_template == "{{ messages }}" != before


def test_the_load_ends_before_the_weights(tmp_path: Path) -> None:
    file, phases = tmp_path / "chat.jinja", list[str]()
    file.write_text("{% if %}")

    with pytest.raises(ModelUnsupported, match=r"chat\.jinja is not valid Jinja: line 1"):
        load(EngineConfig(chat_template=str(file)), on_phase=phases.append)
    assert "weights" not in phases
