"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio.to_thread
from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from engine.types.content import Upload
from engine.types.speech import SpeechFeatures, SpeechInfo
from server.audio.answers import TranscriptStream, whole_answer
from server.audio.budget import FeatureBudget
from server.audio.preparation import form_fields, prepare_transcription, speech_of
from server.audio.transcriber import Transcriber, TranscriptionJob
from server.generation.answer import cancel_on_disconnect
from server.http.errors import CLIENT_CLOSED, invalid_value
from server.http.forms import FileForm
from server.http.middleware import MAX_AUDIO_BYTES, TRANSCRIPTIONS, TRANSLATIONS
from server.models.registry import ModelRegistry
from server.routes.openapi import ERROR_RESPONSES, EVENT_STREAM, streamed_responses
from server.schemas.audio import Task, TranscriptionFields, TranscriptionVerbose
from server.service import Service

_FILE = "file"


def add(app: FastAPI, models: ModelRegistry) -> None:
    """Add the routes."""
    endpoint = _AudioEndpoint(models)
    options: dict[str, Any] = {
        "responses": {**ERROR_RESPONSES, **streamed_responses(TranscriptionVerbose, EVENT_STREAM)},
        "openapi_extra": {"requestBody": _form()},
    }

    @app.post(TRANSCRIPTIONS, **options)
    async def create_transcription(request: Request) -> Response:
        """Turn speech into text."""
        return await endpoint.respond(request, "transcribe")

    @app.post(TRANSLATIONS, **options)
    async def create_translation(request: Request) -> Response:
        """Turn speech of any language into English text."""
        return await endpoint.respond(request, "translate")


class _AudioEndpoint:
    def __init__(self, models: ModelRegistry) -> None:
        self._models, self._budget = models, FeatureBudget()

    async def respond(self, request: Request, task: Task) -> Response:
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        form = FileForm(request, _FILE)
        data = await anyio.to_thread.run_sync(form.parse, body)
        if len(data) > MAX_AUDIO_BYTES:
            raise invalid_value(_FILE, f"it has {len(data)} bytes, and at most {MAX_AUDIO_BYTES} are read")
        fields = form_fields(form.fields, form.lists)
        service = self._models.use(fields.model)
        speech = speech_of(service)
        transcription = await prepare_transcription(service, speech, fields, task, f"transcript-{uuid.uuid4().hex}")
        opening = self._transcriber(service, speech, transcription, Upload("audio", data, _FILE))
        if fields.stream:
            return TranscriptStream(opening, fields, speech, service.settings.limits)

        async def work() -> Response:
            async with opening as (transcriber, features):
                return await whole_answer(transcriber, fields, task, speech, features)

        return await cancel_on_disconnect(request, work())

    @asynccontextmanager
    async def _transcriber(
        self, service: Service, speech: SpeechInfo, transcription: TranscriptionJob, upload: Upload
    ) -> AsyncIterator[tuple[Transcriber, SpeechFeatures]]:
        """The transcriber of a decoded sound, with its language, and the sound's features."""
        features = await anyio.to_thread.run_sync(service.engine.speech.features, upload)
        with self._budget.hold(len(features.array.data)):
            transcriber = Transcriber(service, speech, transcription, features)
            await transcriber.detect_language()
            yield transcriber, features


def _form() -> dict[str, Any]:
    """The body of a request in /openapi.json."""
    schema = TranscriptionFields.model_json_schema()
    schema["properties"] |= {_FILE: {"type": "string", "contentMediaType": "application/octet-stream"}}
    schema["required"] = [_FILE]
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
