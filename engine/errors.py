"""The errors of the engine. They carry data; server/http/errors.py alone maps them to status codes.

EngineError
├── ModelError               the model cannot be served
│   ├── ModelMissing         no such folder, and the hub does not have it
│   │   ├── HubUnreachable   the hub does not answer, and its local cache does not have the model
│   │   └── CacheNotWritable the disk of the hub's local cache is full, or it cannot be written
│   ├── DeviceUnavailable    the device of the settings is not there
│   ├── ModelUnsupported     the model loads, but its outputs are wrong
│   ├── AdapterUnsupported   an adapter of the settings cannot be loaded
│   ├── ModelKept            the model cannot be deleted from the hub's cache
│   ├── ModelInconvertible   the model cannot be converted to another format
│   ├── PlanTooLarge         weights and cache exceed the memory
│   ├── DraftTooLarge        the draft model exceeds the memory that the model leaves
│   └── EmbedderTooLarge     the embedding model exceeds the memory
├── AdapterError             a call that loads or unloads an adapter is refused
│   ├── AdapterLoaded        its name is loaded already
│   ├── AdapterUnknown       no adapter has the name
│   ├── AdapterPathRefused   the path is not below the folder of adapters
│   └── AdaptersFull         the adapter exceeds the memory or the number of adapters
├── RequestError             the request cannot be served; no token was computed for it
│   ├── InvalidRequest       a field has a value that the model or its template refuses
│   │   ├── GrammarTooCostly the grammar exceeds its limits of time or memory
│   │   └── InvalidContent   an image or a sound cannot be decoded, or exceeds a limit
│   └── ContextTooLong       the prompt exceeds the context
├── Unavailable              the engine accepts no request now
│   ├── Loading              the model is loading
│   ├── Overloaded           the queue is full
│   ├── TimeoutTooShort      the request would time out before its first token
│   ├── Draining             the server is shutting down
│   └── EngineDead           the engine thread ended
└── SequenceFailed           a running sequence failed; the others continue
    └── Unsatisfiable        its own constraints permit no token: a retry would fail again
"""

from __future__ import annotations

from typing import Literal

from engine.types.sizes import format_size

# Why an image or a sound is refused: no such format; damaged; too many bytes, pixels or samples; too many in a request.
ContentProblem = Literal["format", "damaged", "too_large", "too_many"]


class EngineError(Exception):
    """The base class of all errors of the engine."""


class ModelError(EngineError):
    """The model cannot be served."""


class ModelMissing(ModelError):
    """The model is neither a local folder nor available from the hub."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"cannot find the model {model!r}: {reason}")
        self.model, self.reason = model, reason


class HubUnreachable(ModelMissing):
    """The hub does not answer, or answers with an error, and the model is not in its local cache."""


class CacheNotWritable(ModelMissing):
    """The disk of the hub's local cache is full, or the cache cannot be written."""


class DeviceUnavailable(ModelError):
    """The device of the settings is not there, or torch cannot use it."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(f"--device {device}: {reason}")
        self.device, self.reason = device, reason


class ModelUnsupported(ModelError):
    """The model runs, but its outputs are wrong."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"cannot serve the model {model!r}: {reason}")
        self.model, self.reason = model, reason


class AdapterUnsupported(ModelError):
    """An adapter cannot be loaded, or the model does not support it."""

    def __init__(self, adapter: str, reason: str) -> None:
        super().__init__(f"cannot load the adapter {adapter!r}: {reason}")
        self.adapter, self.reason = adapter, reason


class AdapterError(EngineError):
    """A call that loads or unloads an adapter is refused."""


class AdapterLoaded(AdapterError):
    """An adapter with the name is loaded already."""

    def __init__(self, adapter: str) -> None:
        super().__init__(f"the adapter {adapter!r} is loaded already")
        self.adapter = adapter


class AdapterUnknown(AdapterError):
    """No loaded adapter has the name."""

    def __init__(self, adapter: str) -> None:
        super().__init__(f"there is no adapter {adapter!r}")
        self.adapter = adapter


class AdapterPathRefused(AdapterError):
    """The path of an adapter is not below the folder of adapters, or there is no such folder."""

    def __init__(self) -> None:
        super().__init__("adapters are loaded from paths below the folder of --lora-dir only")


class AdaptersFull(AdapterError):
    """An adapter exceeds the memory or the number of adapters that are loaded at run time."""

    def __init__(self, size: int, used: int, limit: int, count: int, max_count: int) -> None:
        super().__init__(
            f"the adapter needs {format_size(size)}; {count} of {max_count} adapters (--max-loras) are loaded, with "
            f"{format_size(used)} of {format_size(limit)} (--lora-memory)"
        )
        self.size, self.used, self.limit, self.count, self.max_count = size, used, limit, count, max_count


class ModelKept(ModelError):
    """The model cannot be deleted from the hub's cache."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"cannot delete the model {model!r}: {reason}")
        self.model, self.reason = model, reason


class ModelInconvertible(ModelError):
    """The model cannot be converted to another format."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"cannot convert the model {model!r}: {reason}")
        self.model, self.reason = model, reason


class PlanTooLarge(ModelError):
    """Weights and cache exceed the available memory."""

    def __init__(self, needed_bytes: int, available_bytes: int, advice: str) -> None:
        needed, available = format_size(needed_bytes), format_size(available_bytes)
        super().__init__(f"the memory plan needs {needed} of {available} available: {advice}")
        self.needed_bytes, self.available_bytes, self.advice = needed_bytes, available_bytes, advice


class DraftTooLarge(ModelError):
    """The draft model exceeds the memory that the model leaves."""

    def __init__(self, model: str, plan: PlanTooLarge) -> None:
        super().__init__(
            f"the draft model {model!r} does not fit beside the model: {plan}, or go without: --drafter lookup"
        )
        self.model, self.plan = model, plan


class EmbedderTooLarge(ModelError):
    """The embedding model exceeds the available memory."""

    def __init__(self, model: str, needed_bytes: int, available_bytes: int) -> None:
        needed, available = format_size(needed_bytes), format_size(available_bytes)
        super().__init__(f"the embedding model {model!r} needs {needed} of {available} available")
        self.model, self.needed_bytes, self.available_bytes = model, needed_bytes, available_bytes


class RequestError(EngineError):
    """The request cannot be served."""


class InvalidRequest(RequestError):
    """A field of the request has an invalid or unsupported value."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field, self.reason = field, reason


class GrammarTooCostly(InvalidRequest):
    """A grammar exceeds its limits of time or memory; callers must not try variants of it."""


class InvalidContent(InvalidRequest):
    """An image or a sound of the request cannot be decoded, or exceeds a limit."""

    def __init__(self, field: str, reason: str, problem: ContentProblem) -> None:
        super().__init__(field, reason)
        self.problem = problem


class ContextTooLong(RequestError):
    """The prompt fills the context.

    exact        False: `tokens` is a lower bound, since not all of the text was tokenized
    max_context  the longest context that the settings could allow; 0: `capacity`
    """

    def __init__(self, tokens: int, capacity: int, *, exact: bool = True, max_context: int = 0) -> None:
        super().__init__(f"the prompt has {tokens} tokens, the context holds {capacity}")
        self.tokens, self.capacity, self.exact, self.max_context = tokens, capacity, exact, max_context


class Unavailable(EngineError):
    """The engine accepts no request now."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Loading(Unavailable):
    """The model is loading."""

    def __init__(self, phase: str) -> None:
        super().__init__(f"the model is loading ({phase})", retry_after_seconds=1.0)
        self.phase = phase


class Overloaded(Unavailable):
    """The queue is full."""

    def __init__(self, waiting: int, retry_after_seconds: float) -> None:
        super().__init__(f"{waiting} requests are waiting already", retry_after_seconds)
        self.waiting = waiting


class TimeoutTooShort(Unavailable):
    """The timeout of a request would surely expire before its first token."""

    def __init__(self, timeout_seconds: float, wait_seconds: float) -> None:
        message = (
            f"the first token takes at least {wait_seconds:.1f} s, longer than the timeout of {timeout_seconds:g} s"
        )
        super().__init__(message, wait_seconds - timeout_seconds)
        self.timeout_seconds, self.wait_seconds = timeout_seconds, wait_seconds


class Draining(Unavailable):
    """The server is shutting down and accepts no new request."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down", retry_after_seconds=5.0)


class EngineDead(Unavailable):
    """The engine thread ended, and all requests with it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine stopped: {reason}", retry_after_seconds=30.0)
        self.reason = reason


class LoadDelayed(Unavailable):
    """A model that ended several times is not loaded again before an exact time."""


class SequenceFailed(EngineError):
    """A running sequence failed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unsatisfiable(SequenceFailed):
    """The constraints of the request permit no next token: a retry would fail again."""
