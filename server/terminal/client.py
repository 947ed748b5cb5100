"""A client of OpenAI's chat API: streamed answers, lists of models, capabilities."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from server.terminal.printable import printable

# Of a connection; an answer may take any time.
CONNECT_SECONDS = 10.0
# Comments of event streams that are no phase.
KEEP_ALIVE = ("", "keep-alive", "ping")


class ServerError(Exception):
    """The server cannot be reached, or refuses a request with `status`; the text is for the user."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(printable(text))
        self.status = status


class ConnectionFailed(ServerError):
    """The connection cannot be opened, or ends before the answer."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Text of the answer, or of the reasoning before it."""

    text: str
    reasoning: bool = False


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of an answer: stop, length, ... and the usage, empty if the server sends none."""

    finish_reason: str | None
    usage: dict[str, Any]


class ChatClient:
    """A server at a URL, with or without /v1. Raises ServerError."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"--url must look like http://127.0.0.1:8000, not {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        # Compressed events would arrive in groups.
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        # Proxies of the environment are not for servers of this machine.
        proxies = parts.hostname not in ("127.0.0.1", "localhost", "::1")
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=proxies)

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self, seconds: float = CONNECT_SECONDS) -> list[dict[str, Any]]:
        """The entries of /v1/models."""
        entries = self._get("/v1/models", seconds).get("data")
        return [entry for entry in entries or [] if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

    def capabilities(self, model: str) -> dict[str, Any]:
        """The answer of Cellar's /v1/capabilities; empty for other servers, and for a model that is not loaded."""
        try:
            return self._get("/v1/capabilities", CONNECT_SECONDS, {"model": model})
        except ConnectionFailed:
            raise
        except ServerError:
            return {}

    def stream(
        self, path: str, body: dict[str, Any], on_phase: Callable[[str], None]
    ) -> Generator[AnswerPiece | AnswerEnd]:
        """The pieces of an answer, and its end. Closing the generator cancels the request.

        `on_phase` is called with each phase of a load of the model.
        """
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with _connection_errors(self.url), self._http.stream("POST", path, json=body) as response:
            if response.is_error:
                response.read()
                raise _refusal(response)
            yield from _pieces(_without_comments(response.iter_lines(), on_phase))

    def _get(self, path: str, seconds: float, parameters: dict[str, str] | None = None) -> dict[str, Any]:
        """The JSON object at a path. Loads no model."""
        with _connection_errors(self.url):
            response = self._http.get(path, params=parameters, timeout=seconds, headers={"X-Load": "never"})
        if response.is_error:
            raise _refusal(response)
        try:
            document = response.json()
        except ValueError as error:
            raise ServerError(f"{self.url}{path} is answered with a text that is not JSON") from error
        return document if isinstance(document, dict) else {}


def model_label(entry: dict[str, Any]) -> str:
    """The name of an entry of /v1/models and, of an adapter or one of several models, what it is."""
    status = entry.get("status") or {}
    state = ": ".join(filter(None, (status.get("value"), status.get("progress"), status.get("reason"))))
    adapted = f"adapter of {entry['parent']}" if entry.get("parent") else ""
    notes = ", ".join(filter(None, (adapted, state)))
    return f"{entry['id']} ({notes})" if notes else entry["id"]


@contextmanager
def _connection_errors(url: str) -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise ServerError("the text is not utf-8, the encoding of requests") from error
    except httpx.ConnectError as error:
        raise ConnectionFailed(f"no server answers at {url}") from error
    except httpx.TimeoutException as error:
        raise ConnectionFailed(f"{url} does not answer in time") from error
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ConnectionFailed(f"the connection to {url} ended: {error}") from error


def _refusal(response: httpx.Response) -> ServerError:
    """Status and message of an error."""
    try:
        error = response.json().get("error")
        message = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = response.text[:200]
    key = "; --api-key takes the key" if response.status_code == httpx.codes.UNAUTHORIZED else ""
    return ServerError(f"{message or response.reason_phrase} ({response.status_code}{key})", response.status_code)


def _without_comments(lines: Iterator[str], on_phase: Callable[[str], None]) -> Iterator[str]:
    """The lines of an event stream; those before its first event tell the phases of the load."""
    phase, begun = "", False
    for line in lines:
        begun = begun or line.startswith("data:")
        comment = line.removeprefix(":").strip()
        if line.startswith(":") and not begun and comment not in (phase, *KEEP_ALIVE):
            phase = comment
            on_phase(phase)
        if not line.startswith(":"):
            yield line


def _pieces(lines: Iterator[str]) -> Iterator[AnswerPiece | AnswerEnd]:
    """The pieces of an event stream. Raises ServerError for an error event, ConnectionFailed without an end."""
    finish_reason: str | None = None
    usage: dict[str, Any] = {}
    complete = False
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            complete = True
            break
        event = _event(data)
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            finish_reason = choice.get("finish_reason") or finish_reason
            yield from _choice_pieces(choice)
    if not complete and finish_reason is None:
        raise ConnectionFailed("the answer ended before it was complete")
    yield AnswerEnd(finish_reason, usage)


def _event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise ServerError(f"the server sent an event that is not JSON: {data[:100]}") from error
    if not isinstance(event, dict):
        raise ServerError(f"the server sent an event that is no object: {data[:100]}")
    if problem := event.get("error"):
        raise ServerError(str(problem.get("message") if isinstance(problem, dict) else problem))
    return event


def _choice_pieces(choice: dict[str, Any]) -> Iterator[AnswerPiece]:
    """Of a chat or of a completion."""
    delta = choice.get("delta") or choice
    if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
        yield AnswerPiece(reasoning, reasoning=True)
    if text := delta.get("content") or delta.get("text"):
        yield AnswerPiece(text)
