"""Entries of several models by the command line, a folder and the configuration file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from server.configuration.config_file import ConfigFileError, model_sections
from server.configuration.settings import Settings
from server.models.configured import configured_entries, serves_several

BUNDLED = Path(__file__).parents[3] / "models" / "target"


def test_the_first_model_of_the_command_line_is_loaded_at_the_start() -> None:
    first, second = configured_entries(Settings(pinned=("draft",)), (str(BUNDLED), str(BUNDLED.parent / "draft")), {})
    assert (first.name, first.preloads, first.pinned) == ("target", True, False)
    assert (second.name, second.preloads, second.pinned) == ("draft", False, True)
    assert second.settings.model_names == ("draft",)


def test_a_folder_has_models_of_its_first_level(tmp_path: Path) -> None:
    for folder in ("b", "a", "ranker"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "ranker" / "config.json").write_text('{"architectures": ["BertForSequenceClassification"]}')
    (tmp_path / "empty" / "deeper").mkdir(parents=True)
    for file in ("m.gguf", "x-00001-of-00002.gguf", "x-00002-of-00002.gguf", "mmproj-m.gguf", "notes.txt"):
        (tmp_path / file).touch()
    entries = configured_entries(Settings(models_dir=str(tmp_path)), (), {})
    assert [entry.name for entry in entries] == ["a", "b", "m", "ranker", "x"]
    assert [entry.name for entry in entries if entry.kind == "embedding"] == ["ranker"]


def test_a_section_has_options_of_the_engine(tmp_path: Path) -> None:
    file, lora = tmp_path / "cellar.toml", shutil.copytree(BUNDLED, tmp_path / "lora")
    file.write_text(
        f'max-waiting = 3\n[models.small]\nmodel = "{BUNDLED}"\ncontext = "4k"\nslots = 2\nlora = "style={lora}"\n'
        f'served-model-name = ["tiny"]\n[models.vectors]\nembedding-model = "/e"\n'
    )
    sections = model_sections(file, Settings(max_waiting=3, slots=5))
    small, vectors = configured_entries(Settings(), (), sections)
    assert (small.name, small.aliases, small.source) == ("small", ("tiny", "style"), str(BUNDLED))
    assert (small.settings.context, small.settings.slots, small.settings.max_waiting) == (4096, 2, 3)
    assert (vectors.kind, vectors.source, vectors.settings.slots) == ("embedding", "/e", 5)
    assert (vectors.settings.model, vectors.settings.context, vectors.settings.drafter) == (None, 512, "none")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('[models.a]\nmodel = "x"\nport = 3\n', r"\[models.a\] port is not an option"),
        ("[models.a]\nslots = 4\n", "needs model or embedding-model"),
        ('[models.a]\nmodel = "x"\ncontext = "many"\n', "context must be a whole number"),
        ('[models.a]\nmodel = "x"\nmemory = "3GiB"\n', "memory is not an option"),
    ],
)
def test_a_wrong_section_is_an_error(text: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "cellar.toml"
    file.write_text(text)
    with pytest.raises(ConfigFileError, match=error):
        model_sections(file, Settings())


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"lora": ("a=b",)}, "--lora is of one model"),
        ({"pinned": ("c",)}, "--pin c is no model; there are a, b"),
        ({"served_names": ("n",)}, "--served-model-name is of one model"),
    ],
)
def test_settings_of_one_model_are_refused(settings: dict[str, tuple[str, ...]], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        configured_entries(Settings(**settings), ("a", "b"), {})  # type: ignore[arg-type]


def test_one_model_is_no_server_of_several() -> None:
    assert not serves_several(Settings(), ("a",), {})
    assert serves_several(Settings(), ("a", "b"), {})
    assert serves_several(Settings(models_dir="/m"), (), {})
