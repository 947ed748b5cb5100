"""Commands to a worker process and its replies, as msgpack: typed structs, never pickle.

`number` identifies what a command opened or asked for: the replies to it repeat the number, which is never used again.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import msgspec

from engine.chat_format.detection import ChatFormatSource
from engine.config import EngineConfig
from engine.remote.connection import InvalidMessage, frame
from engine.remote.error_message import ErrorMessage
from engine.remote.invocations import Invocation
from engine.text.fill_in_middle import FillInMiddle
from engine.types.events import Delta, Embedded, Event, Failed, Finished, PrefillProgress, PromptScored, Started
from engine.types.progress import Progress
from engine.types.request import EmbeddingJob, Request
from engine.types.status import AdapterInfo, DraftingInfo, EmbeddingModelInfo, MemoryNeed, MemoryPlan, ModelInfo, Stats

Value = TypeVar("Value")


class RemoteMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A command, a reply or an event: an array with the name of its class."""


class LoadModel(RemoteMessage, frozen=True):
    """LoadModel a model; the first command, and the only one before Ready."""

    config: EngineConfig


class MeasureMemory(RemoteMessage, frozen=True):
    """Answer by MemoryBudget; the only command."""

    config: EngineConfig


class PlanModel(RemoteMessage, frozen=True):
    """Answer by Planned, or by Ended; the only command."""

    config: EngineConfig
    budget_bytes: int


class OpenStream(RemoteMessage, frozen=True):
    """Run a request; answered by Accepted and events, or by Refused."""

    number: int
    request: Request


class EmbedTexts(RemoteMessage, frozen=True):
    """Run texts through the embedding model; otherwise like OpenStream."""

    number: int
    job: EmbeddingJob


class CancelStream(RemoteMessage, frozen=True):
    """End a request of OpenStream or EmbedTexts; a finished one is ignored."""

    number: int


class SetStreamUnread(RemoteMessage, frozen=True):
    """Whether the client leaves the output of a request unread."""

    number: int
    is_unread: bool


class Invoke(RemoteMessage, frozen=True):
    """Call a method in a worker thread; answered by Result or Refused."""

    number: int
    invocation: Invocation


class TakeSnapshot(RemoteMessage, frozen=True):
    """Answered by the EngineSnapshot of a Result, or by Refused."""

    number: int
    owner: str
    salt: bytes


class DrainEngine(RemoteMessage, frozen=True):
    """DrainEngine the engine; answered by the Result None."""

    number: int
    seconds: float


class LoadRemoteAdapter(RemoteMessage, frozen=True):
    """Load an adapter; answered by the Result None, or by Refused."""

    number: int
    name: str
    path: str
    in_place: bool


class UnloadRemoteAdapter(RemoteMessage, frozen=True):
    """Forget an adapter; an unknown name is ignored."""

    name: str


Command = (
    LoadRemoteAdapter
    | UnloadRemoteAdapter
    | LoadModel
    | MeasureMemory
    | PlanModel
    | OpenStream
    | EmbedTexts
    | CancelStream
    | SetStreamUnread
    | Invoke
    | TakeSnapshot
    | DrainEngine
)


class TokenizerValues(RemoteMessage, frozen=True):
    """The values of a TokenizerClient, and the source of its chat format."""

    template_names: frozenset[str]
    has_system_role: bool
    has_chat_template: bool
    fill_in_middle: FillInMiddle | None
    chat_format: ChatFormatSource


class Ready(RemoteMessage, frozen=True):
    """The model is loaded.

    embedding_length  tokens of a text for the embedding model; 0 without one
    """

    info: ModelInfo
    memory: MemoryPlan
    drafting: DraftingInfo
    embedding: EmbeddingModelInfo | None
    embedding_length: int
    tokenizer: TokenizerValues


class MemoryBudget(RemoteMessage, frozen=True):
    """The memory for all models."""

    bytes: int


class Planned(RemoteMessage, frozen=True):
    """The planned memory of a model."""

    need: MemoryNeed


class LoadPhase(RemoteMessage, frozen=True):
    """The load reached a phase."""

    phase: str


class LoadProgress(RemoteMessage, frozen=True):
    """The progress of a phase."""

    progress: Progress


class AdapterList(RemoteMessage, frozen=True):
    """The adapters changed."""

    adapters: tuple[AdapterInfo, ...]


class Ended(RemoteMessage, frozen=True):
    """The load failed, or the engine ended: no request is answered any more."""

    error: ErrorMessage


class Accepted(RemoteMessage, frozen=True):
    """The request of OpenStream or EmbedTexts is queued."""

    number: int


class Refused(RemoteMessage, frozen=True):
    """The error of a command."""

    number: int
    error: ErrorMessage


class Result(RemoteMessage, frozen=True):
    """The value that a command asked for, of a type that follows from the command."""

    number: int
    value: msgspec.Raw


class StartedEvent(RemoteMessage, frozen=True):
    """Event of the request `number`."""

    number: int
    event: Started


class ProgressEvent(RemoteMessage, frozen=True):
    """Event of the request `number`."""

    number: int
    event: PrefillProgress


class ScoredEvent(RemoteMessage, frozen=True):
    """Event of the request `number`."""

    number: int
    event: PromptScored


class EmbeddedEvent(RemoteMessage, frozen=True):
    """Event of the request `number`."""

    number: int
    event: Embedded


class DeltaEvent(RemoteMessage, frozen=True):
    """Event of the request `number`."""

    number: int
    event: Delta


class FinishedEvent(RemoteMessage, frozen=True):
    """Event of the request `number`."""

    number: int
    event: Finished


class FailedEvent(RemoteMessage, frozen=True):
    """Event of the request `number`."""

    number: int
    event: Failed


StreamEvent = StartedEvent | ProgressEvent | ScoredEvent | EmbeddedEvent | DeltaEvent | FinishedEvent | FailedEvent
_EVENTS: dict[type[Event], type[Any]] = {
    Started: StartedEvent,
    PrefillProgress: ProgressEvent,
    PromptScored: ScoredEvent,
    Embedded: EmbeddedEvent,
    Delta: DeltaEvent,
    Finished: FinishedEvent,
    Failed: FailedEvent,
}


def stream_event(number: int, event: Event) -> StreamEvent:
    """The message of an event."""
    message: StreamEvent = _EVENTS[type(event)](number, event)
    return message


class Batch(RemoteMessage, frozen=True):
    """The events of one step; also a sign of life, without events, once a second.

    stats  None: unchanged since the last batch
    """

    events: tuple[StreamEvent, ...]
    stats: Stats | None


Reply = (
    AdapterList
    | MemoryBudget
    | Planned
    | Ready
    | LoadPhase
    | LoadProgress
    | Ended
    | Accepted
    | Refused
    | Result
    | Batch
)

_ENCODER = msgspec.msgpack.Encoder()


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def encode(message: RemoteMessage) -> bytes:
    """A message with its length.

    Raises InvalidMessage if it is too large, UnicodeEncodeError for half of a surrogate pair and OverflowError for
    integers of more than 64 bits.
    """
    return frame(_ENCODER.encode(message))


def encode_value(value: object) -> msgspec.Raw:
    """The value of a Result."""
    return msgspec.Raw(_ENCODER.encode(value))


def decode_command(content: bytes) -> Command:
    """Raises InvalidMessage."""
    command: Command = decode(content, Command)
    return command


def decode_reply(content: bytes) -> Reply:
    """Raises InvalidMessage."""
    reply: Reply = decode(content, Reply)
    return reply


def decode(content: bytes | msgspec.Raw, kind: Any) -> Any:
    """A value of a type. Raises InvalidMessage."""
    try:
        return _decoder(kind).decode(content)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidMessage(f"no {getattr(kind, '__name__', kind)}: {error}") from error
