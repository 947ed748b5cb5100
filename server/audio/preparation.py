"""Validates the form of a transcription against the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio.to_thread

from engine.types.speech import SpeechInfo
from server.audio.segments import text_tokens
from server.audio.transcriber import TranscriptionJob
from server.http.errors import UNSUPPORTED_VALUE, invalid_value, unsupported_parameter
from server.http.parsing import validated
from server.schemas.audio import UNSUPPORTED_FIELDS, Task, TranscriptionFields
from server.service import Service

# Of a model with one language.
_ENGLISH = {"en": "en", "english": "en"}
_NOUNS = {"text": "text", "image": "images", "audio": "audio"}


def form_fields(fields: Mapping[str, str], lists: Mapping[str, Sequence[str]]) -> TranscriptionFields:
    """The fields of a form; ApiError for the first invalid one. Names of `lists` end in []."""
    for name in (*fields, *lists):
        plain = name.partition("[")[0]
        if plain in UNSUPPORTED_FIELDS:
            raise unsupported_parameter(plain, UNSUPPORTED_FIELDS[plain])
    if fields.get("response_format") == "diarized_json":
        raise invalid_value("response_format", "speakers are not told apart", UNSUPPORTED_VALUE)
    form = validated(TranscriptionFields, {**fields, **{name: [*values] for name, values in lists.items()}})
    _check(form)
    return form


def _check(form: TranscriptionFields) -> None:
    """Raise ApiError for fields that contradict each other, and for words with timestamps."""
    is_verbose = form.response_format == "verbose_json"
    if "word" in form.timestamp_granularities:
        reason = "only segments have timestamps"
        raise invalid_value("timestamp_granularities[]", reason, UNSUPPORTED_VALUE)
    if form.timestamp_granularities and not is_verbose:
        raise invalid_value("timestamp_granularities[]", "it needs the response format verbose_json")
    if form.include and form.response_format != "json":
        raise invalid_value("include[]", "log-probabilities need the response format json")
    if form.stream and form.response_format not in ("json", "text"):
        raise invalid_value("stream", "a stream has the response format json or text")


def speech_of(service: Service) -> SpeechInfo:
    """How the model transcribes; ApiError if it does not."""
    service.check_ready()
    info = service.engine.info
    if info.speech is not None:
        return info.speech
    if "audio" in info.input_modalities:
        reason = f"{service.name} answers conversations with audio, and does not transcribe"
    else:
        reads = " and ".join(_NOUNS[name] for name in info.input_modalities)
        reason = f"{service.name} reads {reads} only, no audio"
    raise invalid_value("model", reason, UNSUPPORTED_VALUE)


async def prepare_transcription(
    service: Service, speech: SpeechInfo, form: TranscriptionFields, task: Task, id: str
) -> TranscriptionJob:
    """The validated request; ApiError for a language or a task that the model does not have."""
    if task == "translate" and task not in dict(speech.tasks):
        raise invalid_value("model", f"{service.name} does not translate", UNSUPPORTED_VALUE)
    return TranscriptionJob(
        id=id,
        task=task,
        prompt=await _prompt_tokens(service, speech, form.prompt),
        language=_language(speech, form.language),
        temperature=form.temperature,
        has_logprobs=form.response_format == "verbose_json" or bool(form.include),
    )


async def _prompt_tokens(service: Service, speech: SpeechInfo, text: str) -> tuple[int, ...]:
    """The last tokens of a text before the sound: less than half of the context."""
    if not text.strip():
        return ()
    tokenizer = service.engine.tokenizer
    tokens = await anyio.to_thread.run_sync(lambda: tokenizer.encode(f" {text.strip()}", add_special=False))
    limit = min(speech.max_tokens, service.engine.info.context) // 2 - 1
    return tuple(text_tokens(speech, tokens)[-limit:])


def _language(speech: SpeechInfo, name: str | None) -> str | None:
    """The code of a language by its code or name; None: it is detected."""
    if name is None:
        return None
    names = {key: language.code for language in speech.languages for key in (language.name, language.code)}
    code = (names or _ENGLISH).get(name.strip().lower())
    if code is None:
        codes = ", ".join(sorted({*(names or _ENGLISH).values()}))
        raise invalid_value("language", f"this model has {codes}", UNSUPPORTED_VALUE)
    return code
