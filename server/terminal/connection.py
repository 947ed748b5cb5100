"""The server of `cellar chat` and `cellar run`: one at a URL, a running one with the model, or a new one."""

from __future__ import annotations

import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from bench.launch import LOG_LINES, cellar
from bench.target import BenchError, context_of
from engine.config import BUNDLED_NAME
from server.configuration.options import serve_arguments, serve_environment
from server.configuration.settings import Settings
from server.terminal.client import ChatClient, ConnectionFailed, ServerError

POLL_SECONDS = 0.3
# The most words in the name of a phase.
PHASE_WORDS = 4
PROBE_SECONDS = 2.0
# A wildcard address cannot be called.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of a server.

    context  tokens of a sequence, if known
    log      of a server that was started for this command
    """

    client: ChatClient
    name: str
    context: int | None = None
    log: Path | None = None

    def explain(self, error: ServerError) -> str:
        """The text of an error, with the end of the log if the server has ended."""
        if self.log is None or not isinstance(error, ConnectionFailed):
            return str(error)
        return f"{error}; the end of the server's log:\n{_tail(self.log)}"


@contextmanager
def connected(
    model: str | None, url: str | None, settings: Settings, *, note: Callable[[str], None]
) -> Iterator[ServedModel]:
    """The server with a model, ended after the block if it was started here. Raises ServerError.

    `note` is called with the state of the start.
    """
    keys = settings.all_keys
    model = None if model == BUNDLED_NAME else model
    with ExitStack() as stack:
        if url is not None:
            yield _named(stack.enter_context(ChatClient(url, keys[0] if keys else None)), model)
            return
        client = stack.enter_context(ChatClient(_address(settings), keys[0] if keys else None))
        served = _running(client, model, settings, note)
        if served is None:
            served = stack.enter_context(_started(model, settings, note))
        elif [*serve_arguments(settings)]:
            note(f"{served.name} is served at {client.url}: options of a new server have no effect")
        yield served


def _address(settings: Settings) -> str:
    host = _LOOPBACK.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _named(client: ChatClient, model: str | None) -> ServedModel:
    """A model of the server by its name, else the server's first one."""
    return _model_of(client, client.models(), model)


def _model_of(client: ChatClient, listed: Sequence[dict[str, Any]], model: str | None) -> ServedModel:
    names = tuple(entry["id"] for entry in listed)
    if not names:
        raise ServerError(f"{client.url} lists no model")
    if model is not None and model not in names:
        raise ServerError(f"{client.url} has no model {model}, only {', '.join(names)}")
    entry = next(entry for entry in listed if model in (None, entry["id"]))
    return ServedModel(client, entry["id"], context_of(entry))


def _running(
    client: ChatClient, model: str | None, settings: Settings, note: Callable[[str], None]
) -> ServedModel | None:
    """The running server at the address of the settings if it has the model; without a name, any model."""
    if settings.port == 0:
        return None
    name = None if model is None else replace(settings, model=model).model_names[0]
    try:
        listed = _wait_for_models(client, note)
        return _model_of(client, listed, name)
    except ServerError as error:
        if error.status == httpx.codes.UNAUTHORIZED and model is None:
            raise
        return None


def _wait_for_models(client: ChatClient, note: Callable[[str], None]) -> list[dict[str, Any]]:
    """The models of a running server, after it has loaded them."""
    pause = threading.Event()
    while True:
        try:
            return client.models(PROBE_SECONDS)
        except ServerError as error:
            if error.status != httpx.codes.SERVICE_UNAVAILABLE:
                raise
            note(f"{client.url}: {error}")
        pause.wait(POLL_SECONDS)


@contextmanager
def _started(model: str | None, settings: Settings, note: Callable[[str], None]) -> Iterator[ServedModel]:
    """A new server on a free port of this machine, with its own key."""
    key = secrets.token_urlsafe()
    # Nothing reads its store of responses.
    store = () if settings.store is not None else ("--store", "none")
    arguments = (*([model] if model else []), *serve_arguments(settings), *store)
    label = model or BUNDLED_NAME
    note(f"{label}: start")
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cellar-"))) / "server.log"

        def show_phase(url: str) -> None:
            note(f"{label}: {_phase(url)}")

        try:
            url = stack.enter_context(cellar(arguments, log, serve_environment([key]), show_phase))
        except BenchError as error:
            raise ServerError(_last_message(log) or str(error)) from error
        client = stack.enter_context(ChatClient(url, key))
        yield replace(_named(client, None), log=log)


def _phase(url: str) -> str:
    try:
        return str(httpx.get(f"{url}/health", trust_env=False, timeout=PROBE_SECONDS).json().get("phase", "load"))
    except (httpx.HTTPError, ValueError, AttributeError):
        return "load"


def _last_message(log: Path) -> str | None:
    """The reason why a model cannot be loaded: the last line of the server, if it is longer than a phase."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    last = lines[-1].removeprefix("cellar: ") if lines and lines[-1].startswith("cellar: ") else ""
    return last if len(last.split()) > PHASE_WORDS else None


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
