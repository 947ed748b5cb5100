"""Streamed answers: parsed from the wire, and drawn as Markdown."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from rich.console import Console

from server.terminal.client import AnswerEnd, AnswerPiece, ChatClient, ConnectionFailed, ServerError
from server.terminal.screen import AnswerFigures, AnswerScreen, split_blocks

ANSWER = "# Title\n\nA *text* with `code`.\n\n- one\n- two\n\n```python\nx = 1\n```\n\nThe end."


def draw(pieces: list[AnswerPiece], height: int = 12) -> str:
    """The lines on a terminal of 60 columns after an answer, without what was drawn over."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=60, height=height, color_system=None, highlight=False)
    with AnswerScreen(console) as screen:
        for piece in pieces:
            screen.add(piece)
    return output.getvalue()


def test_finished_blocks_are_split_from_the_growing_one() -> None:
    """At every point of a text, the parts are the text; a list is one block until another one begins."""
    for end in range(len(ANSWER) + 1):
        assert ANSWER[:end] == "".join(split_blocks(ANSWER[:end]))
    assert ("", "- one\n\n- two\n") == split_blocks("- one\n\n- two\n")
    assert ("- one\n\n", "Then") == split_blocks("- one\n\nThen")
    assert ("", "```\na\n\nb") == split_blocks("```\na\n\nb")


def test_an_answer_is_drawn_as_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of any size, the final text is that of the whole."""
    monkeypatch.setattr("server.terminal.screen.REFRESH_SECONDS", 0.0)
    last = draw([AnswerPiece(letter) for letter in ANSWER]).replace("\x1b[2K", "")

    for text in ("Title", "A text with code.", " • one", " • two", "x = 1", "The end."):
        assert text in last
    assert "`" not in last.rpartition("x = 1")[2]


def test_a_model_cannot_control_the_terminal() -> None:
    """Escape sequences lose their first character."""
    shown = draw([AnswerPiece("a\x1b[2Jb\x07c\x9b31md", reasoning=True), AnswerPiece("e\x1b]0;title\x07f\r\x08g")])

    assert "badname" == str(ServerError("bad\x1b\x07name"))
    assert "a[2Jbc31md" in shown
    assert "e]0;titlefg" in shown


def test_blocks_are_one_empty_line_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed letter by letter, as in one piece."""
    blocks = "Text.\n\n> quote\n\n1. one\n2. two\n\n| a |\n|---|\n| 1 |\n\n- three\n"
    monkeypatch.setattr("server.terminal.screen.REFRESH_SECONDS", 0.0)
    letters, whole = (_final(draw([AnswerPiece(piece) for piece in pieces])) for pieces in (blocks, [blocks]))

    assert whole == letters
    assert ["Text.", "", "▌ quote", "", " 1 one", " 2 two", "", ""] == letters[:8]


def _final(output: str) -> list[str]:
    """The lines on the screen, without what was drawn over."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[1A|\x1b\[2K|\r|\n)", re.sub(r"\x1b\[\?25[lh]", "", output)):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part != "\r":
            lines[row] += part
    return "\n".join(line.rstrip() for line in lines).rstrip().split("\n")


def test_a_block_higher_than_the_terminal_shows_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it grows; then all of it is printed once."""
    monkeypatch.setattr("server.terminal.screen.REFRESH_SECONDS", 0.0)
    lines = [f"- item {number}\n" for number in range(40)]

    shown = draw([AnswerPiece(line) for line in lines], height=8)
    assert all(shown.count(f"item {number}\n") + shown.count(f"item {number} ") for number in range(40))
    assert max(block.count("\n") for block in shown.split("\x1b[1A")[:-1]) <= 8


def test_the_figures_of_an_answer() -> None:
    """Counts of the server, else pieces of text."""
    figures = AnswerFigures()
    figures.add(AnswerPiece("a"))
    assert figures.line().startswith("1 token, first token after ")
    figures.first, figures.last, figures.pieces = 0.5, 2.5, 5
    usage = {"prompt_tokens": 9, "completion_tokens": 11, "prompt_tokens_details": {"cached_tokens": 8}}

    assert "5 tokens, 2.0 tokens/s, first token after 0.50 s" == figures.line()
    figures.add(AnswerEnd("length", usage))
    assert (
        "11 tokens, 5.0 tokens/s, first token after 0.50 s, 8 of 9 prompt tokens cached, "
        "cut at --max-tokens or the context"
    ) == figures.line()


def test_an_answer_in_one_piece_has_a_speed() -> None:
    figures = AnswerFigures(first=0.5, last=0.5, pieces=1, usage={"completion_tokens": 11})

    assert figures.line().startswith("11 tokens, 22.0 tokens/s, first token after 0.50 s")


class Answer(BaseHTTPRequestHandler):
    """Answers every request with a body."""

    status, body = 200, b""
    seen: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append(self.headers.get("Authorization", ""))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def answering() -> Callable[[bytes, int], object]:
    @contextmanager
    def serve(body: bytes, status: int = 200) -> Iterator[ChatClient]:
        handler = type("OneAnswer", (Answer,), {"body": body, "status": status})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with ChatClient(f"http://127.0.0.1:{server.server_port}/v1/", "secret") as client:
            yield client
        server.shutdown()
        thread.join()
        server.server_close()

    return serve


def events(*documents: object) -> bytes:
    return b"".join(f"data: {json.dumps(document)}\n\n".encode() for document in documents)


def delta(**fields: str) -> dict[str, object]:
    return {"choices": [{"delta": fields}]}


def test_a_stream_is_parsed(answering: Callable[..., object]) -> None:
    """Reasoning under both of its names, text, the end with its usage; the key is sent."""
    body = events(
        delta(role="assistant"),
        delta(reasoning_content="r", reasoning="r"),
        delta(reasoning="s"),
        delta(content="a"),
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 1}},
    )
    with answering(b": comment\n\n" + body + b"data: [DONE]\n\n") as client:  # type: ignore[attr-defined]
        found = [*client.stream("/v1/chat/completions", {"model": "m"}, print)]

    assert [
        AnswerPiece("r", reasoning=True),
        AnswerPiece("s", reasoning=True),
        AnswerPiece("a"),
        AnswerEnd("stop", {"completion_tokens": 1}),
    ] == found
    assert "Bearer secret" == Answer.seen[-1]


@pytest.mark.parametrize(
    ("body", "status", "error", "message"),
    [
        (events(delta(content="a")), 200, ConnectionFailed, "the answer ended before it was complete"),
        (events({"error": {"message": "no memory"}}), 200, ServerError, "no memory"),
        (b"data: {\n\n", 200, ServerError, "an event that is not JSON"),
        (b"data: 3\n\n", 200, ServerError, "an event that is no object"),
        (b'{"error": {"message": "wrong key"}}', 401, ServerError, "wrong key (401; --api-key takes the key)"),
        (b"<html>", 502, ServerError, "<html> (502)"),
        (b'{"error": "busy"}', 429, ServerError, "busy (429)"),
    ],
)
def test_a_broken_answer_is_an_error(
    answering: Callable[..., object], body: bytes, status: int, error: type[ServerError], message: str
) -> None:
    """With the server's own text."""
    with answering(body, status) as client, pytest.raises(error) as raised:  # type: ignore[attr-defined]
        [*client.stream("/v1/chat/completions", {}, print)]

    assert message in str(raised.value)
