"""Line editing, driven by keys in a pipe."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from server.terminal.line_input import HISTORY_BYTES, LineInput

UP, TAB, CTRL_A, CTRL_C, CTRL_D = "\x1b[A", "\t", "\x01", "\x03", "\x04"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the history."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "cellar"


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


def read(keys: PipeInput, typed: str, prefilled: str = "") -> str:
    keys.send_text(typed)
    return LineInput(["/save", "/stats", "/set"], ["/save"]).read(prefilled)


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("hello\r", "hello"),
        ('"""two\rlines"""\r', "two\nlines"),
        ('"""\rtwo\r\rlines\r"""\r', "two\n\nlines"),
        ('"""one"""\r', "one"),
        ('""""""\r', ""),
        ('"""" is a quote"""\r', '" is a quote'),
        ("\x1b[200~pasted\ntext\x1b[201~ typed\r", "pasted\ntext typed"),
        ("/sta\t\r", "/stats"),
        ("sta\t\r", "sta\t"),
    ],
)
def test_a_message_is_read(keys: PipeInput, typed: str, text: str) -> None:
    """Of one line, of many between quotes, pasted, or completed."""
    assert read(keys, typed).strip() == text.strip()


def test_a_prefilled_message_is_edited(keys: PipeInput) -> None:
    assert read(keys, f"{CTRL_A}Hey! \r", "What is a slot?") == "Hey! What is a slot?"


@pytest.mark.parametrize(("key", "error"), [(CTRL_C, KeyboardInterrupt), (CTRL_D, EOFError)])
def test_the_input_is_left(keys: PipeInput, key: str, error: type[BaseException]) -> None:
    with pytest.raises(error):
        read(keys, key)


def test_a_file_name_is_completed(keys: PipeInput, tmp_path: Path) -> None:
    """Behind commands with a file name, spaces included."""
    (tmp_path / "my talk.json").touch()

    assert read(keys, f"/save {tmp_path}/my t{TAB}\r") == f"/save {tmp_path}/my talk.json"


def test_bytes_outside_utf8_are_replaced(keys: PipeInput, state: Path) -> None:
    keys.send_bytes(b"caf\xe9\r")

    assert read(keys, "") == "caf\ufffd"


def test_the_history_is_private_bounded_and_kept(keys: PipeInput, state: Path) -> None:
    """The next chat has the messages of this one; a large file keeps its end."""
    read(keys, '"""two\rlines"""\r')
    history = state / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert read(keys, f"{UP}\r") == "two\nlines"

    history.write_bytes("\n# then\n+é\n".encode() * (HISTORY_BYTES // 5))
    assert read(keys, f"{UP}\r") == "é"
    assert history.stat().st_size <= HISTORY_BYTES


def test_without_a_folder_the_history_is_in_memory(keys: PipeInput, state: Path) -> None:
    state.write_text("a file")
    editor = LineInput([], [])
    keys.send_text("one\r")
    editor.read()
    keys.send_text(f"{UP}\r")

    assert editor.read() == "one"
