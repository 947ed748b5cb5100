"""Loads the model that a request names before its route runs, and keeps it loaded until the response has ended."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import anyio.to_thread
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import EngineError
from server.http.admission import GENERATION_PATHS
from server.http.auth import caller
from server.http.errors import OLLAMA_PREFIX, ApiError, error_response, from_engine_error, invalid_value
from server.http.forms import FileForm
from server.http.middleware import AUDIO_PATHS, replay
from server.http.parsing import LARGE_BODY_BYTES, PARSED_BODY, joined, loads
from server.models.entry import ModelEntry
from server.models.instance import Lease
from server.models.keep_alive import parse_keep_alive
from server.models.several import SeveralModels
from server.models.waiting_stream import WaitingStream

# Other routes whose body names a model that has to be loaded.
MODEL_PATHS = GENERATION_PATHS | {
    "/api/chat",
    "/api/generate",
    "/v1/tokenize",
    "/tokenize",
    "/v1/detokenize",
    "/detokenize",
    "/v1/apply-template",
    "/apply-template",
    "/v1/chat/completions/input_tokens",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/messages/count_tokens",
}
# "never": a request for a model that is not loaded is answered 503 at once.
LOAD_HEADER = b"x-load"


@dataclass(frozen=True, slots=True)
class ModelFields:
    """The fields of a request that concern its model.

    unloads  whether it only asks for the end of the model, as Ollama's requests without a prompt and with keep_alive 0
    """

    model: str = ""
    stream: bool = False
    keep_alive: float | None = None
    unloads: bool = False


class LoadMiddleware:
    """ASGI middleware: `selected` has a lease of the named model while the app runs."""

    def __init__(self, app: ASGIApp, models: SeveralModels) -> None:
        self.app, self._models = app, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on when its model is loaded, or send the error of the load."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body: bytes | None = None
        if scope["method"] == "POST" and scope["path"] in MODEL_PATHS:
            body = await _read(receive)
            if body is None:
                return
        read: list[Message] = [] if body is None else [{"type": "http.request", "body": body, "more_body": False}]
        stream = WaitingStream(send, scope["path"])
        try:
            fields = await _parsed(scope, body or b"")
            entry = await self._entry(scope, fields.model)
            if entry is None or fields.unloads:
                await self.app(scope, replay(read, receive), send)
                return
            lease = await self._lease(scope, entry, fields, receive, stream)
        except (EngineError, ApiError) as error:
            shown = error if isinstance(error, ApiError) else from_engine_error(error, scope["path"])
            await error_response(shown, scope["path"])(scope, receive, stream.send)
            return
        if lease is None:
            return
        with self._models.hold(fields.model, entry, lease):
            await self.app(scope, replay(read, receive), stream.send)

    async def _entry(self, scope: Scope, name: str) -> ModelEntry | None:
        """The model to load; None if the request names none, or one that does not exist."""
        if scope["path"].startswith(OLLAMA_PREFIX):
            preset = self._models.presets.get(caller().owner, name)
            name = name if preset is None else preset.base
        return await self._models.find(name) if name else None

    async def _lease(
        self, scope: Scope, entry: ModelEntry, fields: ModelFields, receive: Receive, stream: WaitingStream
    ) -> Lease | None:
        """A lease of the model; None if the client disconnected. Events of a stream are comments meanwhile."""
        waits = dict(scope["headers"]).get(LOAD_HEADER, b"").lower() != b"never"
        acquiring = asyncio.create_task(
            self._models.loader.acquire(entry.name, keep_alive=fields.keep_alive, waits=waits)
        )
        disconnect = asyncio.create_task(_disconnected(receive))
        seconds = self._models.settings.limits.ping_seconds
        lease = None
        try:
            while True:
                await asyncio.wait((acquiring, disconnect), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                if acquiring.done():
                    lease = await acquiring
                    return lease
                if disconnect.done():
                    return None
                if fields.stream:
                    await stream.comment(self._models.loader.status(entry.name).phase or "loading")
        finally:
            disconnect.cancel()
            if lease is None:
                acquiring.add_done_callback(_release)
                acquiring.cancel()


def _release(acquiring: asyncio.Task[Lease]) -> None:
    """Release a lease that came too late."""
    if not acquiring.cancelled() and acquiring.exception() is None:
        acquiring.result().release()


async def _read(receive: Receive) -> bytes | None:
    """The body; None if the client disconnected."""
    pieces: list[bytes] = []
    while (message := await receive())["type"] == "http.request":
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return await joined(pieces)
    return None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _parsed(scope: Scope, body: bytes) -> ModelFields:
    if len(body) <= LARGE_BODY_BYTES:
        return _fields(scope, body)
    limiter = scope["app"].state.large_bodies
    return await anyio.to_thread.run_sync(_fields, scope, body, limiter=limiter)


def _fields(scope: Scope, body: bytes) -> ModelFields:
    """The fields of a body, or the query's model. Errors of other fields are the route's to find."""
    [query] = parse_qs(scope["query_string"].decode("latin-1")).get("model", [""])[:1]
    if scope["path"] in AUDIO_PATHS:
        return ModelFields(_form_model(scope, body) or query)
    value: dict[str, Any] = {}
    with suppress(ApiError):
        value = scope["state"][PARSED_BODY] = loads(body)
    path, model = scope["path"], value.get("model", value.get("name"))
    is_ollama = path.startswith(OLLAMA_PREFIX)
    keep_alive = _keep_alive(value.get("keep_alive")) if is_ollama else None
    has_prompt = any(value.get(field) for field in ("prompt", "suffix", "messages", "input"))
    return ModelFields(
        model=model if isinstance(model, str) and model else query,
        # Lines of JSON have no comments.
        stream=value.get("stream") is True and not is_ollama,
        keep_alive=keep_alive,
        unloads=path in ("/api/chat", "/api/generate") and keep_alive == 0 and not has_prompt,
    )


def _form_model(scope: Scope, body: bytes) -> str:
    """The model that a form names; errors of the form are the route's to find."""
    form = FileForm(Request(scope), "file")
    with suppress(ApiError):
        form.parse(body)
    return form.fields.get("model", "")


def _keep_alive(value: object) -> float | None:
    try:
        return None if value is None else parse_keep_alive(value)
    except ValueError as error:
        raise invalid_value("keep_alive", f"it {error}") from error
