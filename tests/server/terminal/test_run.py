"""`cellar run` in pipes: the answer alone on stdout, messages on stderr, exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from server.commands import run as command
from server.schemas.chat import ChatRequest
from server.terminal.media_files import audio_part, image_part
from server.terminal.options import RunOptions
from tests.selection import quick
from tests.server.media.requests import PNG, WAV, data_url, text64
from tests.server.terminal.session import ROOT, TerminalSession

ANSWER = "A slot is one sequence's place in the shared cache. Each running request holds one slot.\n"
COMMAND = (sys.executable, "-c", "from server.cli import main; main()", "run")
QUESTION = "What is a slot?"
Home = dict[str, str]


def run(home: Home, *arguments: str, piped: bytes = b"") -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, input=piped, capture_output=True, env={**os.environ, **home}, timeout=120
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_the_answer_alone_is_on_stdout(url: str, home: Home) -> None:
    """With a prompt as argument, from a pipe, or half of it from each."""
    greedy = ("cellar-tiny", "--url", url, "--temperature", "0")

    assert (0, ANSWER, "") == run(home, *greedy, QUESTION)
    assert (0, ANSWER, "") == run(home, *greedy, piped=QUESTION.encode())
    limited = (*greedy, "--max-tokens", "3", "Repeat this:")
    code, answer, messages = run(home, *limited, piped=b"one two three four")
    assert 0 == code
    assert 0 < len(answer.split()) <= 3
    assert "cellar: the answer is cut at --max-tokens or the context\n" == messages
    code, _, messages = run(home, *limited, "--verbose", piped=b"one two three four")
    figures = r"cellar: 3 tokens, [\d.]+ tokens/s, first token after [\d.]+ s,.* cut at --max-tokens or the context\n"
    assert 0 == code
    assert re.fullmatch(figures, messages)


def test_a_model_is_started_for_one_prompt(home: Home) -> None:
    """Its log goes nowhere near the answer."""
    started = ("cellar-tiny", QUESTION, "--port", "0", "--threads", "1", "--temperature", "0")

    assert (0, ANSWER, "") == run(home, *started)


@pytest.mark.slow
def test_a_model_without_chat_template_continues_the_text(home: Home, tmp_path: Path) -> None:
    """A system prompt has no place there."""
    model = shutil.copytree(ROOT / "models" / "target", tmp_path / "base")
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": None}))
    started = (str(model), "A slot is", "--port", "0", "--threads", "1", "--temperature", "0", "--max-tokens", "8")
    code, answer, messages = run(home, *started)
    refused = run(home, *started, "--system", "Be brief.")

    assert 0 == code, messages
    assert answer.strip()
    assert (2, "") == refused[:2]
    assert "base has no chat template, so --system has no place in its prompt" in refused[2]


def test_a_schema_is_satisfied(url: str, home: Home, tmp_path: Path) -> None:
    """A cut answer does not satisfy it: exit code 1."""
    schema = tmp_path / "schema.json"
    schema.write_text(
        json.dumps(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 8}},
                "required": ["name"],
                "additionalProperties": False,
            }
        )
    )
    with_schema = ("cellar-tiny", "Give a name.", "--url", url, "--json-schema", str(schema))

    code, answer, _ = run(home, *with_schema)
    assert (0, {"name"}) == (code, json.loads(answer).keys())
    assert 1 == run(home, *with_schema, "--max-tokens", "2")[0]
    schema.write_text("{")
    code, answer, messages = run(home, *with_schema)
    assert (2, "") == (code, answer)
    assert f"--json-schema {schema} is not JSON" in messages


@pytest.mark.parametrize(
    ("arguments", "piped", "code", "message"),
    [
        (["cellar-tiny"], b"", 2, "a prompt is missing"),
        (["cellar-tiny"], b"\xff\xfe", 2, "the text from the pipe is not utf-8"),
        (["cellar-tiny", "\udcff"], b"", 1, "the text is not utf-8"),
        (["cellar-tiny", "x", "--temperature", "9"], b"", 1, "less than or equal to 2. (400)"),
        *quick(
            (),
            [
                (["other", "x"], b"", 1, "has no model other, only cellar-tiny"),
                (["cellar-tiny", "x", "--json-schema", "/nonexistent"], b"", 2, "cannot be read: No such file"),
                (
                    ["cellar-tiny", "x", "--config", "/nonexistent"],
                    b"",
                    2,
                    "there is no configuration file /nonexistent",
                ),
            ],
        ),
    ],
)
def test_errors_are_on_stderr(
    url: str, home: Home, arguments: list[str], piped: bytes, code: int, message: str
) -> None:
    """With an exit code, and nothing on stdout."""
    ended, answer, messages = run(home, *arguments, "--url", url, piped=piped)

    assert (code, "") == (ended, answer)
    assert message in messages
    assert 1 == messages.count("\n")


def test_an_answer_that_cannot_be_written(url: str, home: Home) -> None:
    """On a full disk or to a closed stdout: a line with the reason, and code 1."""
    command = [*COMMAND, "cellar-tiny", QUESTION, "--url", url]
    shown = [
        subprocess.run(
            ["sh", "-c", f'"$@" {redirection} </dev/null', "sh", *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, **home},
            timeout=120,
        )
        for redirection in (">/dev/full", ">&-")
    ]

    prefix = "cellar: the answer cannot be written:"
    assert [(1, f"{prefix} No space left on device\n"), (1, f"{prefix} stdout is closed\n")] == [
        (done.returncode, done.stderr) for done in shown
    ]


def test_a_closed_pipe_ends_the_answer(url: str, home: Home, tmp_path: Path) -> None:
    """As of `| head -c 1`: the exit code of other programs, and no traceback."""
    # An answer that is not over when the pipe is closed.
    long_answer = {"type": "array", "items": {"const": "a"}, "minItems": 150, "maxItems": 150}
    (tmp_path / "schema").write_text(json.dumps(long_answer))
    command = [*COMMAND, "cellar-tiny", QUESTION, "--url", url, "--json-schema", str(tmp_path / "schema")]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **home},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b"[" == process.stdout.read(1)
        process.stdout.close()
        assert b"" == process.stderr.read()
    assert 141 == process.returncode


def test_a_terminal_gets_the_text_and_the_pipe_every_byte(url: str, home: Home) -> None:
    """On a terminal the spinner of the start is gone when the answer is there."""
    arguments = ["run", "cellar-tiny", QUESTION, "--url", url, "--temperature", "0"]
    with TerminalSession(arguments, home) as session:
        assert 0 == session.end()
        assert ANSWER.strip() in session.text


def test_images_and_sounds_precede_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.WAV").write_bytes(WAV)
    served = Mock(**{"client.capabilities.return_value": {"model": {"chat": True}}})
    served.name = "seer"
    media = [image_part(tmp_path / "a.png"), audio_part(tmp_path / "b.WAV")]

    path, body = command._request(served, [*media, {"type": "text", "text": "What?"}], None, RunOptions())

    image, sound, text = body["messages"][0]["content"]
    assert path == "/v1/chat/completions"
    assert image["image_url"]["url"] == data_url(PNG)
    assert sound["input_audio"] == {"data": text64(WAV), "format": "wav"}
    assert text == {"type": "text", "text": "What?"}
    assert ChatRequest.model_validate(body)


def test_files_that_cannot_be_sent(url: str, home: Home, tmp_path: Path) -> None:
    """No image, no sound, and an image for a model that reads text."""
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "a.txt").write_text("text")
    for option, file, code, reason in (
        ("--image", "a.txt", 2, "is no PNG, JPEG, WebP or GIF image"),
        ("--audio", "a.txt", 2, "has no name of a sound"),
        ("--image", "a.png", 1, "cellar-tiny reads text only, no images"),
    ):
        ended, answer, messages = run(home, "cellar-tiny", QUESTION, "--url", url, option, str(tmp_path / file))
        assert (ended, answer) == (code, "")
        assert reason in messages
