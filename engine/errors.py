"""What can go wrong in the engine. Errors carry data; server/http/errors.py alone turns them into status codes.

EngineError
├── ModelError            the model cannot be served
│   ├── ModelMissing      no such folder, or the hub does not have it or is out of reach
│   ├── ModelUnsupported  it loads, but not in a way that gives right results
│   ├── PlanTooLarge      weights and cache do not fit the memory
│   ├── DraftTooLarge     those of the draft model do not fit beside them
│   └── EmbedderTooLarge  the embedding model does not fit
├── RequestError          this request cannot be served; nothing was computed for it
│   ├── InvalidRequest    a field has a value that the model or its template refuses
│   │   └── GrammarTooCostly     its grammar takes too much time or memory
│   └── ContextTooLong    the prompt does not fit the context
├── Unavailable           the engine takes no request now
│   ├── Loading           the model is not ready yet
│   ├── Overloaded        the queue is full
│   ├── Draining          the server is going down
│   └── EngineDead        the engine thread ended
└── SequenceFailed        a running sequence broke; the others go on
    └── Unsatisfiable     by its own rules, which leave nothing to say: it would break again
"""

from __future__ import annotations


class EngineError(Exception):
    """The root of all errors of this package."""


class ModelError(EngineError):
    """The model cannot be served."""


class ModelMissing(ModelError):
    """The model is neither a folder here nor to be had from the hub."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"cannot find the model {model!r}: {reason}")
        self.model, self.reason = model, reason


class ModelUnsupported(ModelError):
    """The model cannot be run with right results."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"cannot serve the model {model!r}: {reason}")
        self.model, self.reason = model, reason


class PlanTooLarge(ModelError):
    """Weights and cache need more memory than there is."""

    def __init__(self, needed_bytes: int, available_bytes: int, advice: str) -> None:
        needed, available = needed_bytes / 2**30, available_bytes / 2**30
        super().__init__(f"the memory plan needs {needed:.1f} GiB of {available:.1f} GiB available: {advice}")
        self.needed_bytes, self.available_bytes, self.advice = needed_bytes, available_bytes, advice


class DraftTooLarge(ModelError):
    """The model has its memory, and what is left is not enough for the draft model."""

    def __init__(self, model: str, plan: PlanTooLarge) -> None:
        super().__init__(
            f"the draft model {model!r} does not fit beside the model: {plan}, or go without: --drafter lookup"
        )
        self.model, self.plan = model, plan


class EmbedderTooLarge(ModelError):
    """The embedding model needs more memory than there is."""

    def __init__(self, model: str, needed_bytes: int, available_bytes: int) -> None:
        needed, available = needed_bytes / 2**30, available_bytes / 2**30
        super().__init__(f"the embedding model {model!r} needs {needed:.1f} GiB of {available:.1f} GiB available")
        self.model, self.needed_bytes, self.available_bytes = model, needed_bytes, available_bytes


class RequestError(EngineError):
    """This request cannot be served."""


class InvalidRequest(RequestError):
    """A field of the request has a value that cannot be served."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field, self.reason = field, reason


class GrammarTooCostly(InvalidRequest):
    """A grammar takes so much time or memory that nothing else like it shall be tried for the same request."""


class ContextTooLong(RequestError):
    """The prompt leaves no room for an answer.

    exact    False: it has at least so many tokens; the rest was not counted
    max_context  the context that another setting allows; 0: no more than `capacity`
    """

    def __init__(self, tokens: int, capacity: int, *, exact: bool = True, max_context: int = 0) -> None:
        super().__init__(f"the prompt has {tokens} tokens, the context holds {capacity}")
        self.tokens, self.capacity, self.exact, self.max_context = tokens, capacity, exact, max_context


class Unavailable(EngineError):
    """The engine takes no request now; later it may."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Loading(Unavailable):
    """The model is not ready yet."""

    def __init__(self, phase: str) -> None:
        super().__init__(f"the model is loading ({phase})", retry_after_seconds=1.0)
        self.phase = phase


class Overloaded(Unavailable):
    """The queue is full."""

    def __init__(self, waiting: int, retry_after_seconds: float) -> None:
        super().__init__(f"{waiting} requests are waiting already", retry_after_seconds)
        self.waiting = waiting


class Draining(Unavailable):
    """The server is going down and takes no new request."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down", retry_after_seconds=5.0)


class EngineDead(Unavailable):
    """The engine thread ended, and with it every request."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine stopped: {reason}", retry_after_seconds=30.0)
        self.reason = reason


class SequenceFailed(EngineError):
    """One sequence broke while it ran."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unsatisfiable(SequenceFailed):
    """What the request allows leaves no token to say: the same request would end the same way."""
