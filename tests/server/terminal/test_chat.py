"""`cellar chat` on a pseudo-terminal, as a user sees it."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from server.terminal.client import AnswerEnd, AnswerPiece, ChatClient, model_label
from server.terminal.media_files import MAX_BYTES
from tests.server.fakes import HERMES, serve_in_thread
from tests.server.media.requests import PNG, MediaTokenizer, media_engine
from tests.server.terminal.session import CTRL_C, CTRL_D, PROMPT, ROOT, TerminalSession

FIGURES = re.compile(r"\d+ tokens, \d+\.\d tokens/s, first token after \d+\.\d\d s")
ANSWER = "A slot is one sequence's place in the shared cache."
Home = dict[str, str]
# Of a busy machine.
PATIENCE_SECONDS = 120.0
CANCELLED = 'cellar_requests_total{endpoint="chat",finish_reason="cancelled",'


def chat(url: str, home: Home, *arguments: str) -> TerminalSession:
    return TerminalSession(["chat", "--url", url, "--temperature", "0", *arguments], home)


def counted(url: str, name: str) -> float:
    """A metric of the server."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=PATIENCE_SECONDS).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def wait_until(condition: object) -> None:
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_an_answer_with_its_figures(url: str, home: Home) -> None:
    """Text, tokens per second and the time to the first token; Ctrl-D ends with exit code 0."""
    with chat(url, home) as session:
        session.wait("cellar-tiny at ")
        session.wait(PROMPT)
        shown = session.ask("What is a slot?")
        session.type(CTRL_D)

        assert ANSWER in shown
        assert FIGURES.search(shown)
        assert 0 == session.end()


def test_the_chat_says_that_the_bundled_model_is_a_demonstration(url: str, home: Home) -> None:
    """And names others for this machine."""
    with chat(url, home) as session:
        shown = session.wait(PROMPT)

        assert "This is a demonstration: it knows Cellar, tools and JSON" in shown
        assert "cellar chat smollm2 " in shown


def test_a_dumb_terminal(url: str, home: Home) -> None:
    """It has no line editing, and the chat works."""
    with chat(url, {**home, "TERM": "dumb"}) as session:
        session.wait(PROMPT)
        assert FIGURES.search(session.ask("What is a slot?"))
        session.type("/quit\r")

        assert 0 == session.end()


@pytest.mark.slow
def test_a_model_is_started_for_the_chat_and_ended_with_it(home: Home) -> None:
    """On a free port, when no server has the model; neither Ctrl-C nor the end of the terminal leaves it behind."""
    with TerminalSession(["chat", "cellar-tiny", "--port", "0", "--threads", "1"], home) as session:
        session.wait("cellar-tiny; /help")
        session.wait(PROMPT)
        (server,) = psutil.Process(session.process.pid).children()
        session.type(CTRL_C)
        session.wait("Ctrl-D or /quit ends the chat.")
        session.wait(PROMPT)
        assert server.is_running()
        assert FIGURES.search(session.ask("What is a slot?"))
        assert 128 + signal.SIGHUP == session.end_by(signal.SIGHUP)

    assert not server.is_running()


def test_a_running_server_at_the_default_address_is_used(url: str, home: Home) -> None:
    """Without a model, and for a model that it has."""
    port = url.rpartition(":")[2]
    with TerminalSession(["chat", "--port", port], home) as session:
        session.wait(f"cellar-tiny at {url}")
        session.wait(PROMPT)
        session.type(CTRL_D)
        assert 0 == session.end()


def test_ctrl_c_stops_the_answer_and_not_the_chat(url: str, home: Home) -> None:
    """The request is cancelled at the server, its slot is free, and the text so far stays in the conversation."""
    before = counted(url, CANCELLED)
    with chat(url, home) as session:
        session.wait(PROMPT)
        # On a busy machine an answer that ends with the context would end before Ctrl-C.
        for parameter in ("ignore_eos true", "overflow shift", "max_tokens 1000000"):
            session.ask(f"/set {parameter}")
        session.type("Tell me about Cellar\r")
        wait_until(lambda: counted(url, "cellar_requests_running") == 1)
        session.wait("Tell me about Cellar")
        session.wait(" ")
        session.type(CTRL_C)
        assert "first token after" in session.wait("stopped")
        session.wait(PROMPT)
        wait_until(lambda: counted(url, "cellar_requests_running") == 0)
        session.ask("/set ignore_eos default")
        session.ask("/set max_tokens default")
        assert "answers    1" in session.ask("/stats")
        assert FIGURES.search(session.ask("What is a slot?"))
        session.type(CTRL_D)
        assert 0 == session.end()

    assert before + 1 == counted(
        url, 'cellar_requests_total{endpoint="chat",finish_reason="cancelled",model_name="cellar-tiny"}'
    )


def test_the_history_is_private_and_kept(url: str, home: Home) -> None:
    """Arrow up brings back the message of an earlier chat, many lines included."""
    with chat(url, home) as session:
        session.wait(PROMPT)
        session.type('"""What is\r')
        session.wait("...")
        session.type('a slot?"""\r')
        session.wait("tokens/s")
        session.wait(PROMPT)
        session.type(CTRL_D)
        session.end()
    history = Path(home["XDG_STATE_HOME"]) / "cellar" / "chat_history"

    assert '+"""What is\n+a slot?"""\n' in history.read_text()
    assert 0o600 == stat.S_IMODE(history.stat().st_mode)
    with chat(url, home) as session:
        session.wait(PROMPT)
        session.type("\x1b[A")
        session.wait("a slot?")
        session.type(f"\r{CTRL_D}")
        assert FIGURES.search(session.wait("tokens/s") + session.wait(PROMPT))


def test_a_conversation_is_saved_loaded_edited_and_answered_anew(url: str, home: Home, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    (tmp_path / "mine").write_text("mine")
    with chat(url, home, "--system", "Be short.") as session:
        session.wait(PROMPT)
        session.ask("What is a slot?")
        assert f"saved in {saved}" in session.ask(f"/save {saved}")
        assert "exists already" in session.ask(f"/save {tmp_path / 'mine'}")
        assert FIGURES.search(session.ask("/retry"))
        session.type("/edit\r")
        session.wait("What is a slot?")
        session.type("\x01Hey! \r")
        assert FIGURES.search(session.wait("tokens/s") + session.wait(PROMPT))
        session.ask(f"/save {tmp_path / 'second.json'}")
        session.ask("/clear")
        assert "there is no message yet" in session.ask("/retry")
        assert f"2 messages of {saved}" in session.ask(f"/load {saved}")
        assert "is no saved conversation" in " ".join(session.ask(f"/load {tmp_path / 'mine'}").split())

    first, second = (json.loads((tmp_path / name).read_text()) for name in ("talk.json", "second.json"))
    assert "mine" == (tmp_path / "mine").read_text()
    assert ("Be short.", {"temperature": 0.0}, "cellar-tiny") == (
        first["system"],
        first["parameters"],
        first["model"],
    )
    assert ["user", "assistant"] == [message["role"] for message in first["messages"]]
    assert ["Hey! What is a slot?"] == [message["content"] for message in second["messages"][:-1]]


def test_commands_and_their_errors(url: str, home: Home, tmp_path: Path) -> None:
    """Each is one clear line, and the chat goes on."""
    image, large, fake = tmp_path / "a.png", tmp_path / "b.png", tmp_path / "c.png"
    image.write_bytes(b"\x89PNG\r\n\x1a\nx")
    with chat(url, home) as session:
        session.wait(PROMPT)
        assert "/retry" in session.ask("/help")
        assert "/retry" in session.ask("/?")
        assert "/hlp is not a command; the nearest one is /help" in session.ask("/hlp")
        assert "A space before / makes it text." in " ".join(session.ask("/usr is a folder").split())
        assert "temprature is no parameter; the nearest one is temperature" in session.ask("/set temprature 1")
        assert "model is set by the chat itself" in session.ask("/set model x")
        assert "temperature = 0.2" in session.ask("/set temperature 0.2")
        assert "temperature = 0.2" in session.ask("/set")
        assert "temperature: the default" in session.ask("/set temperature default")
        assert "system prompt: Be kind." in session.ask("/system Be kind.")
        assert "system prompt: none" in session.ask("/system none")
        assert "* cellar-tiny" in session.ask("/model")
        assert "no model other, only cellar-tiny" in session.ask("/model other")
        assert "/clear takes no argument" in session.ask("/clear all")
        for file in (image, large, fake):
            assert "cellar-tiny on this server does not read images" in session.ask(f"/image {file}")
        session.ask("/set temperature 9")
        refused = session.ask("What is a slot?")
        assert "less than or equal to 2. (400)" in refused
        assert "Arrow up brings the message back." in refused
        session.ask("/set temperature 0")
        assert ANSWER in session.ask("What is a slot?")
        session.type("/bye\r")
        assert 0 == session.end()


def test_an_image_reaches_a_model_that_reads_images(home: Home, tmp_path: Path) -> None:
    """With the next message only, before its text."""
    image, engine = tmp_path / "a.png", media_engine("image")
    image.write_bytes(PNG)
    engine.tokenizer = MediaTokenizer(HERMES)
    with serve_in_thread(engine) as port, chat(f"http://127.0.0.1:{port}", home) as session:
        session.wait(PROMPT)
        assert "The image is sent with the next message." in session.ask(f"/image {image}")
        session.ask("What is it?")
        [upload] = engine.tokenizer.rendered[-1]["uploads"]
        assert upload.data == PNG
        assert [part["type"] for part in engine.tokenizer.rendered[-1]["messages"][0]["content"]] == ["image", "text"]
        assert "* fake" in session.ask("/model")
        session.ask("/model org/alias")
        session.ask("And now?")
        assert [upload.data for upload in engine.tokenizer.rendered[-1]["uploads"]] == [PNG]
        session.type(CTRL_D)
        assert session.end() == 0


def test_the_phases_of_a_load_precede_the_answer() -> None:
    """Comments of the stream before its first event, each once; later ones only keep the connection open."""
    body = b": weights\n\n: weights\n\n: keep-alive\n\n: self-test\n\n"
    body += b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n\n: slow\n\ndata: [DONE]\n\n'

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    phases: list[str] = []
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with ChatClient(f"http://127.0.0.1:{server.server_port}") as client:
            pieces = list(client.stream("/v1/chat/completions", {}, phases.append))
        thread.join()
    assert pieces == [AnswerPiece("Hi"), AnswerEnd(None, {})]
    assert phases == ["weights", "self-test"]


@pytest.mark.parametrize(
    ("entry", "label"),
    [
        ({"id": "a"}, "a"),
        ({"id": "a", "parent": "b"}, "a (adapter of b)"),
        ({"id": "a", "status": {"value": "loading", "progress": "weights 43 %"}}, "a (loading: weights 43 %)"),
        ({"id": "a", "status": {"value": "failed", "reason": "wrong outputs"}}, "a (failed: wrong outputs)"),
    ],
)
def test_a_model_is_shown_with_its_state(entry: dict[str, Any], label: str) -> None:
    assert model_label(entry) == label


def test_completion_of_commands_and_files(url: str, home: Home) -> None:
    """The folder has a short path: a line that wraps is drawn in parts."""
    with tempfile.TemporaryDirectory() as folder, chat(url, home) as session:
        Path(folder, "conversation.json").write_text("")
        session.wait(PROMPT)
        session.type("/st\t")
        session.wait("/stats")
        session.type(f"\r/load {folder}/conv\t")
        session.wait("answers    0")
        session.wait("conversation.json")


def test_a_chat_without_terminal_is_refused(url: str, home: Home) -> None:
    """With the command that takes a pipe."""
    command = [sys.executable, "-c", "from server.cli import main; main()", "chat", "--url", url]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, **home}
    )

    assert (2, "") == (done.returncode, done.stdout)
    assert "cellar: chat needs a terminal; cellar run takes a prompt from a pipe\n" == done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--url", "ftp://x"], "--url must look like http://127.0.0.1:8000, not 'ftp://x'"),
        pytest.param(["org/none", "--port", "0"], "cannot find the model 'org/none'", marks=pytest.mark.slow),
    ],
)
def test_a_chat_that_cannot_begin(home: Home, arguments: list[str], message: str) -> None:
    """One line with the reason, exit code 1."""
    environment = {**home, "HF_ENDPOINT": "http://127.0.0.1:9", "COLUMNS": "200"}
    with TerminalSession(["chat", *arguments], environment) as session:
        assert 1 == session.end()
        assert f"cellar: {message}" in session.text
        assert "Traceback" not in session.text


def test_images_are_limited_in_size(tmp_path: Path) -> None:
    """As a request is."""
    from server.terminal.media_files import MediaFileError, data_url

    file = tmp_path / "a"
    for start, kind in ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"RIFFxxxxWEBP", "webp")):
        file.write_bytes(start)
        assert data_url(file).startswith(f"data:image/{kind};base64,")
    file.write_bytes(b"GIF88a")
    with pytest.raises(MediaFileError, match="is no PNG, JPEG, WebP or GIF image"):
        data_url(file)
    file.write_bytes(b"\xff\xd8\xff" + bytes(MAX_BYTES))
    with pytest.raises(MediaFileError, match=r"at most 20\.0 MiB can be sent"):
        data_url(file)
