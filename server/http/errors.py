"""All errors of the API. No other file of the server names status codes.

An `ErrorKind` is a row of the table in docs/errors.md: status, type and code; an `ApiError` adds a message. The
exception handlers here, and `error_response` outside FastAPI, send the envelope {"error": {"message", "type", "param",
"code"}}, or the error format of another API. Messages contain no input except short field names.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine import errors as engine_errors
from engine.types.events import Finished
from server.http.encoding import JsonResponse
from server.store.database import StoreError, StoreFullError


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Status, type and code of an error."""

    status: int
    type: str
    code: str


INVALID_VALUE = ErrorKind(400, "invalid_request_error", "invalid_value")
INVALID_BASE64_IMAGE = ErrorKind(400, "invalid_request_error", "invalid_base64_image")
INVALID_IMAGE_FORMAT = ErrorKind(400, "invalid_request_error", "invalid_image_format")
INVALID_IMAGE_URL = ErrorKind(400, "invalid_request_error", "invalid_image_url")
IMAGE_TOO_LARGE = ErrorKind(400, "invalid_request_error", "image_too_large")
IMAGE_PARSE_ERROR = ErrorKind(400, "invalid_request_error", "image_parse_error")
FAILED_TO_DOWNLOAD_IMAGE = ErrorKind(400, "invalid_request_error", "failed_to_download_image")
INVALID_JSON = ErrorKind(400, "invalid_request_error", "invalid_json")
INVALID_HTTP = ErrorKind(400, "invalid_request_error", "invalid_http")
UNKNOWN_PARAMETER = ErrorKind(400, "invalid_request_error", "unknown_parameter")
UNSUPPORTED_PARAMETER = ErrorKind(400, "invalid_request_error", "unsupported_parameter")
UNSUPPORTED_VALUE = ErrorKind(400, "invalid_request_error", "unsupported_value")
PREVIOUS_RESPONSE_NOT_FOUND = ErrorKind(400, "invalid_request_error", "previous_response_not_found")
CONNECTION_LIMIT = ErrorKind(400, "invalid_request_error", "websocket_connection_limit_reached")
FILE_IN_USE = ErrorKind(400, "invalid_request_error", "file_in_use")
UNSATISFIABLE = ErrorKind(400, "invalid_request_error", "unsatisfiable")
CONTEXT_LENGTH_EXCEEDED = ErrorKind(400, "invalid_request_error", "context_length_exceeded")
INVALID_API_KEY = ErrorKind(401, "invalid_request_error", "invalid_api_key")
ORIGIN_NOT_ALLOWED = ErrorKind(403, "invalid_request_error", "origin_not_allowed")
ADAPTER_PATH_NOT_ALLOWED = ErrorKind(403, "invalid_request_error", "adapter_path_not_allowed")
KEY_REQUIRED = ErrorKind(403, "invalid_request_error", "key_required")
SCOPE_REQUIRED = ErrorKind(403, "invalid_request_error", "scope_required")
MODEL_NOT_FOUND = ErrorKind(404, "invalid_request_error", "model_not_found")
RESPONSE_NOT_FOUND = ErrorKind(404, "invalid_request_error", "response_not_found")
FILE_NOT_FOUND = ErrorKind(404, "invalid_request_error", "file_not_found")
BATCH_NOT_FOUND = ErrorKind(404, "invalid_request_error", "batch_not_found")
UNKNOWN_REPLICA = ErrorKind(404, "invalid_request_error", "unknown_replica")
UNKNOWN_URL = ErrorKind(404, "invalid_request_error", "unknown_url")
METHOD_NOT_ALLOWED = ErrorKind(405, "invalid_request_error", "method_not_allowed")
REQUEST_TIMEOUT = ErrorKind(408, "invalid_request_error", "request_timeout")
DEADLINE_EXCEEDED = ErrorKind(408, "invalid_request_error", "deadline_exceeded")
BODY_TOO_LARGE = ErrorKind(413, "invalid_request_error", "body_too_large")
STORAGE_FULL = ErrorKind(413, "invalid_request_error", "storage_full")
UNSUPPORTED_MEDIA_TYPE = ErrorKind(415, "invalid_request_error", "unsupported_media_type")
HOST_NOT_ALLOWED = ErrorKind(421, "invalid_request_error", "host_not_allowed")
QUEUE_FULL = ErrorKind(429, "rate_limit_error", "queue_full")
KEY_LIMIT_REACHED = ErrorKind(429, "rate_limit_error", "key_limit_reached")
TOO_MANY_WEBSOCKETS = ErrorKind(429, "rate_limit_error", "too_many_websockets")
HEADERS_TOO_LARGE = ErrorKind(431, "invalid_request_error", "headers_too_large")
INTERNAL_ERROR = ErrorKind(500, "server_error", "internal_error")
GENERATION_FAILED = ErrorKind(500, "server_error", "generation_failed")
MODEL_LOADING = ErrorKind(503, "unavailable_error", "model_loading")
MODEL_FAILED = ErrorKind(503, "unavailable_error", "model_failed")
SERVER_DRAINING = ErrorKind(503, "unavailable_error", "server_draining")
TOO_MANY_CONNECTIONS = ErrorKind(503, "unavailable_error", "too_many_connections")
HUB_UNREACHABLE = ErrorKind(503, "unavailable_error", "hub_unreachable")
THREADS_EXHAUSTED = ErrorKind(503, "unavailable_error", "threads_exhausted")
ENGINE_DEAD = ErrorKind(503, "unavailable_error", "engine_dead")
STORE_UNAVAILABLE = ErrorKind(503, "unavailable_error", "store_unavailable")
LOAD_TIMEOUT = ErrorKind(504, "unavailable_error", "load_timeout")
ADAPTERS_FULL = ErrorKind(507, "unavailable_error", "adapters_full")
DISK_FULL = ErrorKind(507, "unavailable_error", "disk_full")

# Paths with another error format.
ANTHROPIC_PREFIX = "/v1/messages"
OLLAMA_PREFIX = "/api/"
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
}

# Fields of engine requests that have another name in the requests of clients.
CLIENT_FIELDS = {"score_from": "prompt_logprobs"}
# The field of the prompt by the end of the path. /score has none: either text of a pair may be too long.
PROMPT_FIELDS: Mapping[str, str | None] = {
    "/chat/completions": "messages",
    "/chat/completions/render": "messages",
    "/chat/completions/input_tokens": "messages",
    "/apply-template": "messages",
    "/embeddings": "input",
    "/decisions": "input",
    "/rerank": "documents",
    "/score": None,
}

# The end of the field of a sound; OpenAI's codes of contents are for images.
AUDIO_MEMBER = "input_audio.data"
# The field of a sound in a form.
AUDIO_FILE = "file"
CONTENT_PROBLEMS: Mapping[engine_errors.ContentProblem, ErrorKind] = {
    "format": INVALID_IMAGE_FORMAT,
    "damaged": IMAGE_PARSE_ERROR,
    "too_large": IMAGE_TOO_LARGE,
    "too_many": INVALID_VALUE,
}

# The status of a WebSocket handshake in the log.
SWITCHING_PROTOCOLS = 101
# The status in the log after the client's disconnect (nginx uses the same number).
CLIENT_CLOSED = 499

# openai-python does not retry at all for a Retry-After above 120 s.
MAX_RETRY_SECONDS = 60
# Retry-After while the store's database is out of reach.
STORE_RETRY_SECONDS = 10
# The wait, before it is spread, while the system gives the server no thread.
THREAD_RETRY_SECONDS = 5.0

logger = logging.getLogger("cellar.http")


class ApiError(HTTPException):
    """An error response. FastAPI passes an HTTPException on while it reads a body."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(kind.status, message, dict(headers or {}))
        self.kind, self.message, self.param, self.details = kind, message, param, dict(details or {})

    @property
    def body(self) -> dict[str, object]:
        """The envelope."""
        named = {"message": self.message, "type": self.kind.type, "param": self.param, "code": self.kind.code}
        return {"error": {**named, **self.details}}


def error_response(error: ApiError, path: str) -> Response:
    """The response to a request for `path`."""
    return JsonResponse(error_body(error, path), error.kind.status, error.headers)


def error_body(error: ApiError, path: str) -> dict[str, object]:
    """The body in the format of the API of `path`."""
    if path == ANTHROPIC_PREFIX or path.startswith(f"{ANTHROPIC_PREFIX}/"):
        kind = ANTHROPIC_TYPES.get(error.kind.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    if path.startswith(OLLAMA_PREFIX):
        return {"error": error.message}
    return error.body


def from_engine_error(error: engine_errors.EngineError, path: str) -> ApiError:
    """The API error of an engine error; `path` names the field of the prompt."""
    match error:
        case engine_errors.ContextTooLong():
            # Agents search for either wording, OpenAI's or llama.cpp's, to start the compaction of their history.
            more = ", which exceeds the available context size when an answer is to follow. Please shorten the prompt."
            field = next((name for end, name in PROMPT_FIELDS.items() if path.endswith(end)), "prompt")
            return context_too_long(error, field, subject="the prompt", advice=more)
        case engine_errors.InvalidContent():
            is_audio = error.field == AUDIO_FILE or error.field.endswith(AUDIO_MEMBER)
            kind = INVALID_VALUE if is_audio else CONTENT_PROBLEMS[error.problem]
            return invalid_value(error.field, error.reason, kind)
        case engine_errors.InvalidRequest():
            return invalid_value(CLIENT_FIELDS.get(error.field, error.field), error.reason)
        case engine_errors.AdapterError() | engine_errors.AdapterUnsupported():
            return _adapter_error(error)
        case engine_errors.Unavailable():
            return _unavailable(error)
        case engine_errors.ModelError():
            message = f"The model cannot be loaded: {error}."
            return ApiError(MODEL_FAILED, message, headers={"x-should-retry": "false"})
        case engine_errors.Unsatisfiable():
            return ApiError(UNSATISFIABLE, f"The request allows no answer: {error.reason}.")
        case engine_errors.SequenceFailed():
            return ApiError(GENERATION_FAILED, f"The generation failed: {error.reason}")
        case _:
            return internal_error()


def invalid_value(field: str, reason: str, kind: ErrorKind = INVALID_VALUE) -> ApiError:
    """An invalid value of a field; `reason` follows a colon."""
    return ApiError(kind, f"Invalid value for '{field}': {reason}.", param=field)


def file_not_found(id: str, param: str | None = None) -> ApiError:
    """There is no such file, or it is another owner's."""
    return ApiError(FILE_NOT_FOUND, f"No such File object: '{id[:128]}'.", param=param)


def body_too_large(limit: int) -> ApiError:
    """A body, or its part without images and sounds, has more bytes than `limit`."""
    return ApiError(BODY_TOO_LARGE, f"The body is larger than {limit} bytes.", headers={"Connection": "close"})


def missing_parameter(field: str) -> ApiError:
    """A required field is missing."""
    return ApiError(INVALID_VALUE, f"Missing required parameter: '{field}'.", param=field)


def context_too_long(error: engine_errors.ContextTooLong, field: str | None, *, subject: str, advice: str) -> ApiError:
    """`subject` has more tokens than the context; `advice` follows their number."""
    count = error.tokens if error.exact else f"at least {error.tokens}"
    message = f"This model's maximum context length is {error.capacity} tokens. However, {subject} has {count}{advice}"
    if error.tokens < error.max_context:
        message += f" Started with a larger --context, this server holds up to {error.max_context} tokens."
    details = {"n_prompt_tokens": error.tokens, "n_ctx": error.capacity}
    return ApiError(CONTEXT_LENGTH_EXCEEDED, message, param=field, details=details)


def unsupported_parameter(field: str, reason: str) -> ApiError:
    """A documented parameter that the served model does not support."""
    message = f"This server does not support '{field}' with this model: {reason}."
    return ApiError(UNSUPPORTED_PARAMETER, message, param=field)


def load_timeout(model: str, seconds: float) -> ApiError:
    """The load of a model took longer than a request waits for it; it goes on."""
    message = f"The model '{model}' was not loaded within {seconds:g} s. The load goes on: try again later."
    return ApiError(LOAD_TIMEOUT, message, param="model", headers={"Retry-After": str(MAX_RETRY_SECONDS)})


def model_removed(model: str) -> ApiError:
    """The files of a model are gone."""
    return ApiError(MODEL_NOT_FOUND, f"The model '{model}' was removed from this server.", param="model")


def internal_error() -> ApiError:
    """An unexpected exception. The log has the traceback, under the request id."""
    return ApiError(INTERNAL_ERROR, "The server had an error while processing your request.")


def unexpected_error(error: Exception, subject: str) -> ApiError:
    """Log an exception that nothing expected, of `subject`: 503 if no thread or process can be started, else 500."""
    # Python has no class for threads; that of processes is EAGAIN.
    no_thread = isinstance(error, RuntimeError) and str(error) == "can't start new thread"
    if no_thread or isinstance(error, BlockingIOError):
        logger.error("%s failed, as no thread or process can be started: %s", subject, error)
        message = "The system gives the server no further threads or processes. Try again later."
        return ApiError(THREADS_EXHAUSTED, message, headers={"Retry-After": str(_retry_seconds(THREAD_RETRY_SECONDS))})
    logger.error("%s failed", subject, exc_info=error)
    return internal_error()


def check_deadline(finished: Sequence[Finished]) -> None:
    """Raise ApiError if all choices reached their deadline before the first token."""
    if all(_timed_out_empty(event) for event in finished):
        message = "'timeout' expired before the first token."
        raise ApiError(DEADLINE_EXCEEDED, message, param="timeout", headers={"x-should-retry": "false"})


def install(app: FastAPI) -> None:
    """Add the exception handlers; validation.py adds pydantic's."""
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(engine_errors.EngineError, _on_engine)
    app.add_exception_handler(StoreError, _on_store)


def _timed_out_empty(event: Finished) -> bool:
    return event.reason == "length" and event.stop == "deadline" and not event.usage.completion_tokens


def _adapter_error(error: engine_errors.AdapterError | engine_errors.AdapterUnsupported) -> ApiError:
    """The texts are vLLM's where it has the error."""
    match error:
        case engine_errors.AdapterLoaded():
            message = (
                f"The lora adapter '{error.adapter}' has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True."
            )
            return ApiError(INVALID_VALUE, message, param="lora_name")
        case engine_errors.AdapterUnknown():
            return ApiError(MODEL_NOT_FOUND, f"The lora adapter '{error.adapter}' cannot be found.", param="lora_name")
        case engine_errors.AdapterPathRefused():
            return ApiError(ADAPTER_PATH_NOT_ALLOWED, _sentence(error), param="lora_path")
        case engine_errors.AdaptersFull():
            return ApiError(ADAPTERS_FULL, _sentence(error), headers={"x-should-retry": "false"})
        case _:
            return ApiError(INVALID_VALUE, _sentence(error), param="lora_path")


def _sentence(error: engine_errors.EngineError) -> str:
    return f"{str(error)[:1].upper()}{str(error)[1:]}."


def _unavailable(error: engine_errors.Unavailable) -> ApiError:
    retry = {"Retry-After": str(_retry_seconds(error.retry_after_seconds))}
    message = _sentence(error)
    match error:
        case engine_errors.Overloaded() | engine_errors.TimeoutTooShort():
            return ApiError(QUEUE_FULL, message, headers=retry)
        case engine_errors.Loading():
            return ApiError(MODEL_LOADING, message, headers=retry, details={"phase": error.phase})
        case engine_errors.Draining():
            return ApiError(SERVER_DRAINING, message, headers={**retry, "Connection": "close"})
        case engine_errors.LoadDelayed():
            remaining = max(math.ceil(error.retry_after_seconds), 1)
            return ApiError(ENGINE_DEAD, message, headers={"Retry-After": str(remaining)})
        case _:
            return ApiError(ENGINE_DEAD, message, headers=retry)


def _retry_seconds(estimate: float) -> int:
    """The estimated wait and up to half as much again, at random: refused clients come back one after another."""
    least = min(max(math.ceil(estimate), 1), MAX_RETRY_SECONDS * 2 // 3)
    return least + secrets.randbelow((least + 1) // 2 + 1)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path: str = request.scope["path"]
    if isinstance(error, ApiError):
        return error_response(error, path)
    if error.status_code == UNKNOWN_URL.status:
        return error_response(ApiError(UNKNOWN_URL, "There is nothing at this URL."), path)
    if error.status_code == METHOD_NOT_ALLOWED.status:
        return error_response(
            ApiError(METHOD_NOT_ALLOWED, "This URL does not support this method.", headers=error.headers), path
        )
    return error_response(internal_error(), path)


async def _on_engine(request: Request, error: Exception) -> Response:
    assert isinstance(error, engine_errors.EngineError)
    path: str = request.scope["path"]
    return error_response(from_engine_error(error, path), path)


async def _on_store(request: Request, error: Exception) -> Response:
    logger.error("the store failed: %s", error)
    if isinstance(error, StoreFullError):
        message = "The disk of the store is full: nothing was stored. Deleting responses or files makes space."
        refused = ApiError(DISK_FULL, message, headers={"x-should-retry": "false"})
    else:
        message = "The store of responses and files is broken or unreachable."
        refused = ApiError(STORE_UNAVAILABLE, message, headers={"Retry-After": str(STORE_RETRY_SECONDS)})
    return error_response(refused, request.scope["path"])
