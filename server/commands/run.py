"""`cellar run`: the answer to one prompt on stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from server.commands.chat import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, end_by_signals, starting
from server.configuration.settings import Settings
from server.terminal.client import AnswerPiece, ServerError
from server.terminal.connection import ServedModel, connected
from server.terminal.conversation import Conversation
from server.terminal.media_files import MediaFileError, audio_part, image_part
from server.terminal.options import RunOptions
from server.terminal.printable import printable
from server.terminal.screen import AnswerFigures

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
# 128 + SIGPIPE, as of other programs in a pipe.
EXIT_PIPE = 141


class OutputError(OSError):
    """The answer cannot be written; the text is for the user."""


class PromptError(ValueError):
    """The prompt or the schema cannot be read; the text is for the user."""


def run_once(model: str, prompt: str | None, options: RunOptions, settings: Settings) -> int:
    """Print the answer to a prompt; the exit code."""
    messages = Console(stderr=True, highlight=False)
    try:
        text, schema = read_prompt(prompt), _read_schema(options.json_schema)
        media = [*map(image_part, options.image), *map(audio_part, options.audio)]
        with (
            end_by_signals(),
            starting(messages) as note,
            connected(model, options.url, settings, note=note) as served,
        ):
            path, body = _request(served, [*media, {"type": "text", "text": text}] if media else text, schema, options)
            figures = _print_answer(served, path, body, note)
    except (PromptError, MediaFileError) as error:
        return _fail(messages, str(error), EXIT_USAGE)
    except (OutputError, ServerError) as error:
        return _fail(messages, str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return EXIT_PIPE
    is_cut = figures.finish_reason == "length"
    if options.verbose:
        messages.print(Text(f"cellar: {figures.line()}"), soft_wrap=True)
    elif is_cut:
        messages.print("cellar: the answer is cut at --max-tokens or the context", soft_wrap=True)
    return EXIT_FAILED if is_cut and schema is not None else 0


def _fail(messages: Console, text: str, code: int) -> int:
    messages.print(Text(f"cellar: {text}"), soft_wrap=True)
    return code


def read_prompt(prompt: str | None) -> str:
    """The prompt and the text from a pipe after it. Raises PromptError."""
    try:
        piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise PromptError(f"the text from the pipe is not {error.encoding}: {error.reason}") from error
    text = "\n\n".join(part for part in (prompt or "", piped.strip("\n")) if part.strip())
    if not text:
        raise PromptError("a prompt is missing: cellar run MODEL PROMPT, or a text from a pipe")
    return text


def _read_schema(path: Path | None) -> Any:
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PromptError(f"--json-schema {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise PromptError(f"--json-schema {path} is not JSON: {error}") from error


def _request(
    served: ServedModel, content: str | list[dict[str, Any]], schema: Any, options: RunOptions
) -> tuple[str, dict[str, Any]]:
    """Path and body: a chat or, for a model without chat template, a completion of the text.

    content  a text, or the parts of a message with images and sounds
    """
    conversation = Conversation(system=options.system, parameters=options.parameters)
    if schema is not None:
        json_schema = {"name": "answer", "schema": schema, "strict": True}
        conversation.parameters["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    described = served.client.capabilities(served.name).get("model") or {}
    if described.get("chat", True):
        conversation.messages.append({"role": "user", "content": content})
        return CHAT_PATH, conversation.body(served.name)
    if options.system:
        raise PromptError(f"{served.name} has no chat template, so --system has no place in its prompt")
    if not isinstance(content, str):
        raise PromptError(f"{served.name} has no chat template, so images and sounds have no place in its prompt")
    return COMPLETION_PATH, {**conversation.parameters, "model": served.name, "prompt": content}


def _print_answer(served: ServedModel, path: str, body: dict[str, Any], note: Callable[[str], None]) -> AnswerFigures:
    """Print the answer while it arrives; its figures. Raises ServerError, OutputError and BrokenPipeError."""
    figures, text = AnswerFigures(), ""
    note(f"{served.name}: prompt")
    with closing(served.client.stream(path, body, lambda phase: note(f"{served.name}: {phase}"))) as pieces:
        for piece in pieces:
            figures.add(piece)
            match piece:
                case AnswerPiece(reasoning=True):
                    note(f"{served.name}: reasoning")
                case AnswerPiece():
                    note("")
                    text = piece.text
                    _write(text)
    if not text.endswith("\n"):
        _write("\n")
    return figures


def _write(text: str) -> None:
    """Write text to stdout at once."""
    if sys.stdout is None:
        raise OutputError("the answer cannot be written: stdout is closed")
    try:
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except UnicodeEncodeError as error:
        raise OutputError(f"the answer cannot be written in {error.encoding}; PYTHONIOENCODING=utf-8 is") from error
    except OSError as error:
        _discard_output()
        raise OutputError(f"the answer cannot be written: {error.strerror}") from error


def _discard_output() -> None:
    # At exit Python would write the rest of its buffer, and fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
