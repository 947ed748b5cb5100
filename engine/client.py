"""The protocol of an engine: what the server uses of it, in this process or in another one.

Arguments, results and events are plain, frozen values. Methods of tokenizers and grammars block: they are for worker
threads, and each is one call. `chat_format`, `template` and `fill_in_middle` are values that follow from the files of
the tokenizer: a client of another process derives them once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from engine.chat_format.chat_format import ChatFormat
from engine.chat_format.message import Tool
from engine.text.fill_in_middle import FillInMiddle
from engine.types.content import Upload
from engine.types.events import Delta, Event, Logprob
from engine.types.request import EmbeddingInput, EmbeddingJob, Grammar, RenderedPrompt, Request
from engine.types.snapshot import EngineSnapshot
from engine.types.speech import SpeechFeatures
from engine.types.status import DraftingInfo, EmbeddingModelInfo, MemoryPlan, ModelInfo, Stats


class EventStream(Protocol):
    """The events of one request: Started, deltas, then exactly one Finished or Failed.

    fast_path  called with a delta that arrives while the reader waits; False queues the delta. Must not raise
    """

    fast_path: Callable[[Delta], bool] | None

    def __aiter__(self) -> AsyncIterator[Event]: ...


class TokenizerClient(Protocol):
    """The tokenizer and the chat template of the model. Methods raise InvalidRequest or ContextTooLong."""

    chat_format: ChatFormat
    template_names: frozenset[str]
    has_system_role: bool
    fill_in_middle: FillInMiddle | None

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def template(self) -> str: ...

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...

    def encode_truncated(self, text: str) -> list[int]: ...

    def encode_gap(self, before: str, after: str, files: Sequence[tuple[str, str]] = ()) -> list[int]: ...

    def encode_prediction(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def describe_tokens(self, tokens: Sequence[int]) -> list[Logprob]: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, object] | None = None,
        breakpoints: Sequence[tuple[int, int]] = (),
        uploads: Sequence[Upload] = (),
    ) -> RenderedPrompt: ...


class SpeechClient(Protocol):
    """The feature extractor of a model that transcribes."""

    def features(self, upload: Upload) -> SpeechFeatures:
        """Decode a sound and extract its features. Blocks. Raises InvalidContent, and Overloaded."""


class EmbeddingTokenizerClient(Protocol):
    """The tokenizer of the embedding model. Methods raise InvalidRequest or ContextTooLong."""

    max_length: int

    def prompt(self, purpose: str | None) -> str: ...

    def encode(self, text: str, *, prompt: str = "", max_tokens: int | None = None) -> EmbeddingInput: ...

    def encode_pair(self, query: str, document: str, *, max_tokens: int | None = None) -> EmbeddingInput: ...

    def truncate(self, tokens: Sequence[int], *, max_tokens: int | None = None) -> EmbeddingInput: ...


class GrammarClient(Protocol):
    """The grammar compiler. Compiled grammars stay in the engine."""

    def compile(self, grammar: Grammar) -> object:
        """Check a grammar; the result is the engine's own. Raises InvalidRequest."""

    def prepare(self) -> bool:
        """Build one part of the vocabulary in advance; whether parts are missing."""


class EngineClient(Protocol):
    """One engine with one model, and perhaps an embedding model. Methods belong to the event loop's thread."""

    def start(self) -> None:
        """Begin to load the model. Call it inside the event loop that uses the engine."""

    async def wait_ready(self) -> None:
        """Return when the model is loaded. Raises the ModelError or EngineDead of a failed load."""

    async def wait_dead(self) -> None:
        """Return when the engine is no longer `alive`."""

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""

    @property
    def alive(self) -> bool:
        """Whether the engine makes progress; a load of any duration is alive."""

    @property
    def phase(self) -> str:
        """A phase of loading, "ready", "draining", or "dead: " and the reason."""

    @property
    def info(self) -> ModelInfo:
        """The model, with its adapters now. Raises Loading before it is loaded."""

    @property
    def memory(self) -> MemoryPlan:
        """The memory plan. Raises Loading before the model is loaded."""

    @property
    def drafting(self) -> DraftingInfo:
        """The drafters; none before the model is loaded."""

    @property
    def tokenizer(self) -> TokenizerClient:
        """Raises Loading before the model is loaded."""

    @property
    def grammars(self) -> GrammarClient:
        """Raises Loading before the model is loaded."""

    @property
    def speech(self) -> SpeechClient:
        """The feature extractor of a model whose info has `speech`. Raises Loading before the model is loaded."""

    @property
    def embedding(self) -> EmbeddingModelInfo | None:
        """The embedding model; None if there is none, or before it is loaded."""

    @property
    def embedding_tokenizer(self) -> EmbeddingTokenizerClient:
        """The tokenizer of the embedding model, which must exist."""

    def stats(self) -> Stats:
        """The statistics after the last step."""

    async def snapshot(self, owner: str, salt: bytes) -> EngineSnapshot:
        """The state between two steps, with sequences of `owner` and cached prefixes under `salt`.

        Raises Loading, and EngineDead if the engine ends.
        """

    def has_adapter(self, name: str) -> bool:
        """Whether requests can name an adapter: a loaded one, or one of the folder of adapters."""

    async def load_adapter(self, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter below the folder of adapters; `in_place`: in place of an adapter with its name, which running
        requests keep.

        Raises Loading, EngineDead, AdapterUnsupported and subclasses of AdapterError.
        """

    def unload_adapter(self, name: str) -> None:
        """Forget a loaded adapter at once; running requests keep it. Raises Loading, EngineDead, AdapterUnknown."""

    def check_admission(self, owner: str) -> None:
        """Raise Overloaded if `open` would refuse every request of the owner now because the queue is full."""

    def reserve(self, owner: str) -> AbstractContextManager[None]:
        """Count a request of the owner as waiting inside the block: one that is being prepared for `open`."""

    def open(self, request: Request) -> AbstractAsyncContextManager[EventStream]:
        """Run a request inside the block; leaving the block cancels it.

        Raises before the request is queued: Loading, Draining, EngineDead, Overloaded, TimeoutTooShort, ContextTooLong,
        InvalidRequest.
        """

    def embed(self, job: EmbeddingJob) -> AbstractAsyncContextManager[EventStream]:
        """Run texts, tokenized by `embedding_tokenizer`, through the embedding model; otherwise like `open`."""

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, and wait for the running ones; after `seconds` they end with Failed."""

    def close(self) -> None:
        """Stop the engine and wait for its end."""
