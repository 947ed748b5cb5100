"""`cellar convert` on the console."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.cli import make_app
from tests.engine.convert.checkpoints import save_multimodal

BUNDLED = Path(__file__).parents[3] / "models" / "target"


def run(*arguments: object) -> int:
    """The exit code of `cellar convert`."""
    with pytest.raises(SystemExit) as end:
        make_app()(["convert", *map(str, arguments)])
    return int(end.value.code or 0)


def test_model_is_converted_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line of output each; an existing target is kept without --force."""
    file, folder = tmp_path / "model.gguf", tmp_path / "folder"

    assert 0 == run(BUNDLED, file, "--type", "bf16", "--pre-tokenizer", "smollm")
    assert 0 == run(file, folder)
    assert 1 == run(file, folder)
    assert 0 == run(file, folder, "--force")

    lines = capsys.readouterr().out.splitlines()
    assert [f"{file}:", f"{folder}:", "cellar:", f"{folder}:"] == [line.split(" ")[0] for line in lines]
    assert all(line.endswith("MiB") for line in lines if not line.startswith("cellar"))
    assert lines[2].endswith("exists; --force replaces it")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {each.name for each in folder.iterdir()}


@pytest.mark.filterwarnings("ignore")
def test_parts_that_are_left_out_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_multimodal("llava", tmp_path / "model")
    capsys.readouterr()

    assert run(tmp_path / "model", tmp_path / "model.gguf") == 0

    assert capsys.readouterr().out.splitlines()[0] == "text only: its image parts are left out"


def test_file_that_is_no_model_is_one_line_and_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.bin").write_bytes(b"<html>Not found</html>")

    assert 1 == run(tmp_path / "model.bin", tmp_path / "model.gguf")

    (line,) = capsys.readouterr().out.splitlines()
    assert "an HTML page, such as the answer to a failed download" in line


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [((), "--pre-tokenizer names one that is close"), (("--pre-tokenizer", "gpt2"), "gpt2 is none of default, ")],
)
def test_pre_tokenizer_without_a_name_in_gguf_is_refused(
    arguments: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundled model's splits no contractions."""
    assert 1 == run(BUNDLED, tmp_path / "model.gguf", *arguments)
    assert reason in capsys.readouterr().out


def test_variables_are_no_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CELLAR_FORCE", "1")

    assert 2 == run(BUNDLED, tmp_path / "model.gguf")
    assert "CELLAR_FORCE is no setting" in capsys.readouterr().out
