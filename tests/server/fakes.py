"""A fake engine that plays scripted events, an ASGI client, and a real server in a thread.

The client is here because starlette's wants another httpx and warns about ours, and because httpx's ASGI transport
gives no answer before its end: neither could see a stream.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from engine.chat_format.detection import AddedVocabulary, detect_chat_format
from engine.errors import (
    AdapterUnknown,
    ContextTooLong,
    Draining,
    EngineError,
    GrammarTooCostly,
    InvalidContent,
    InvalidRequest,
    Loading,
    Overloaded,
)
from engine.text.fill_in_middle import FillInMiddle
from engine.text.variables import undeclared_variables
from engine.types.content import Upload
from engine.types.events import Delta, Event, Failed, Finished, Logprob, Started, Timings, TokenLogprob, Usage
from engine.types.request import EmbeddingJob, Grammar, RenderedPrompt, Request
from engine.types.snapshot import EngineSnapshot
from engine.types.speech import SpeechFeatures
from engine.types.status import AdapterInfo, DraftingInfo, EmbeddingModelInfo, MemoryPlan, ModelInfo, Stats
from server.configuration.settings import ClientLimits, Settings
from server.hosting import Hosting
from server.lifecycle import Lifecycle, listen
from tests.server.embedders import FakeEmbeddingTokenizer, count_letters

INFO = ModelInfo(
    fingerprint="0123456789abcdef",
    name="fake/model",
    folder="/models/fake",
    architecture="FakeForCausalLM",
    parameters=1234,
    dtype="float32",
    vocabulary=256,
    context=64,
    slots=4,
    batch_invariant=True,
)
MEMORY = MemoryPlan(
    weights_bytes=4 << 20,
    cells=256,
    cell_bytes=512,
    cache_bytes=131072,
    workspace_bytes=1 << 20,
    available_bytes=1 << 30,
)
TIMINGS = Timings(queue_seconds=0.5, prompt_seconds=0.25, generation_seconds=0.125)
WORDS = ("Hello", " wor", "ld")


class Gate:
    """A place in a script where it waits until the test opens it, from any thread."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wait(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reached.set()
        await self._open.wait()

    def open(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._open.set)


Script = Callable[[Request], Iterable[Event | Gate]]


def speak(request: Request) -> Iterator[Event]:
    """The script of a request that goes well: three words, and the end."""
    yield Started(len(request.prompt), 0, 7)
    for token, word in enumerate(WORDS):
        entries = (
            ()
            if request.logprobs is None
            else (entry(token, word, request.logprobs, offset=len("".join(WORDS[:token]))),)
        )
        yield Delta(word, (token,), entries)
    yield finished(request)


def finished(request: Request, **changes: Any) -> Finished:
    """The last event of `speak`, or one that differs from it."""
    usage = Usage(prompt_tokens=len(request.prompt), completion_tokens=len(WORDS), cached_tokens=0)
    return Finished(**{"reason": "stop", "stop": None, "usage": usage, "timings": TIMINGS, **changes})


def entry(token: int, text: str, top: int, *, offset: int = 0) -> TokenLogprob:
    """A chosen token at a text offset, and `top` others; the last one has the probability 0."""
    others = [Logprob(100 + place, f"<{place}>", b"x", -float(place + 1)) for place in range(top)]
    if others:
        others[-1] = Logprob(100 + top - 1, others[-1].text, b"x", -math.inf)
    return TokenLogprob(Logprob(token, text, text.encode(), -0.5), tuple(others), text_offset=offset)


# As in Qwen's templates: reasoning between <think>, calls as JSON between <tool_call>.
HERMES = "{{ tools }}<tool_call>{% if enable_thinking %}<think></think>{% endif %}{{ reasoning_effort }}{{ verbosity }}"


class FakeTokenizer:
    """A byte is a token; the lines of a chat are its messages.

    template        the chat format is detected from it
    opened          text after the last message
    fill_in_middle  None: there are no tokens for it
    """

    fill_in_middle: FillInMiddle | None = None
    has_system_role = True

    def __init__(self, template: str = "", opened: str = "") -> None:
        self.template, self.opened = template, opened
        self.template_names = undeclared_variables(template)
        self.rendered: list[dict[str, Any]] = []
        marks = {mark: token for mark, token in (("<think>", 254), ("</think>", 255)) if mark in template}
        vocabulary = AddedVocabulary(
            marks, frozenset(), lambda text: [marks[text]] if text in marks else self.encode(text)
        )
        self.chat_format = detect_chat_format(template, vocabulary)

    @property
    def has_chat_template(self) -> bool:
        return True

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def encode_truncated(self, text: str) -> list[int]:
        return self.encode(text)[: 4 * INFO.context]

    def encode_gap(self, before: str, after: str, files: Sequence[tuple[str, str]] = ()) -> list[int]:
        assert self.fill_in_middle is not None
        others = self.fill_in_middle.file_tokens(files, self.encode, INFO.context)
        return self.fill_in_middle.prompt((), self.encode(before), self.encode(after), others)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()

    def describe_tokens(self, tokens: Sequence[int]) -> list[Logprob]:
        return [Logprob(token, chr(token), bytes([token]), 0.0) for token in tokens]

    def encode_prediction(self, text: str) -> list[int]:
        return self.encode(text)

    def render_chat(self, messages: Sequence[Mapping[str, object]], **options: Any) -> RenderedPrompt:
        self.rendered.append({"messages": list(messages), **options})
        if any(message["content"] == "refuse me" for message in messages):
            raise InvalidRequest("messages", "the template refuses it")
        text = "".join(f"{message['content']}\n" for message in messages)
        return RenderedPrompt(tuple(self.encode(text)), generation_prompt=self.opened)


class FakeGrammars:
    """Accepts every grammar without keywords for errors, partial enforcement or timeouts."""

    def __init__(self) -> None:
        self.compiled: list[Grammar] = []
        self.missing_parts = 3

    def prepare(self) -> bool:
        self.missing_parts -= 1
        return self.missing_parts > 0

    def compile(self, grammar: Grammar) -> None:
        self.compiled.append(grammar)
        if "endless" in grammar.source:
            raise GrammarTooCostly("grammar", "it takes too long")
        lines = grammar.source.splitlines()
        if any("unkeepable" in line or ("unreadable" in line and "lenient" not in line) for line in lines):
            raise InvalidRequest("grammar", "unimplemented keyword 'unreadable'")


class FakeSpeech:
    """Refuses every sound."""

    def features(self, upload: Upload) -> SpeechFeatures:
        raise InvalidContent(upload.field, "the sound is damaged", "damaged")


class PlayedStream:
    """engine.output.stream.RequestStream, of a script that goes on when its reader waits for more."""

    def __init__(self, events: AsyncIterator[Event]) -> None:
        self._events = events
        self.fast_path: Callable[[Delta], bool] | None = None

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self._events:
            if self.fast_path is None or not isinstance(event, Delta) or not self.fast_path(event):
                yield event


@dataclass
class FakeEngine:
    """The border of engine.Engine; `script` makes the events of each request, `refusal` is raised on opening."""

    script: Script = speak
    embeds: Callable[[EmbeddingJob], Iterable[Event | Gate]] = count_letters
    phase: str = "ready"
    alive: bool = True
    refusal: EngineError | None = None
    failure: EngineError | None = None
    info_value: ModelInfo = INFO
    numbers: Stats = field(default_factory=Stats)
    admissions: list[str] = field(default_factory=list)
    reserved: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    left: threading.Event = field(default_factory=threading.Event)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    grammars: FakeGrammars = field(default_factory=FakeGrammars)
    speech: FakeSpeech = field(default_factory=FakeSpeech)
    memory: MemoryPlan = MEMORY
    drafting: DraftingInfo = DraftingInfo()
    embedding: EmbeddingModelInfo | None = None
    embedding_tokenizer: FakeEmbeddingTokenizer = field(default_factory=FakeEmbeddingTokenizer)
    jobs: list[EmbeddingJob] = field(default_factory=list)
    # The state of the engine; and the owner and salt of each request for it.
    state: EngineSnapshot = EngineSnapshot(Stats(), 0.0, 64, (), (), (), ())
    inspected: list[tuple[str, bytes]] = field(default_factory=list)
    adapter_error: EngineError | None = None
    cut: set[asyncio.Event] = field(default_factory=set)

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    async def wait_ready(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def wait_dead(self) -> None:
        while self.alive:
            await asyncio.sleep(0.05)

    @property
    def ready(self) -> bool:
        return self.phase == "ready"

    @property
    def info(self) -> ModelInfo:
        if self.phase not in ("ready", "draining"):
            raise Loading(self.phase)
        return self.info_value

    def stats(self) -> Stats:
        return self.numbers

    async def snapshot(self, owner: str, salt: bytes) -> EngineSnapshot:
        self.inspected.append((owner, salt))
        return self.state

    def has_adapter(self, name: str) -> bool:
        return any(adapter.name == name for adapter in self.info_value.adapters)

    async def load_adapter(self, name: str, path: str, *, in_place: bool) -> None:
        if self.adapter_error is not None:
            raise self.adapter_error
        adapter = AdapterInfo(name, path, 8, ("q_proj",), 1 << 20)
        self.info_value = replace(self.info_value, adapters=(*self.info_value.adapters, adapter))

    def unload_adapter(self, name: str) -> None:
        if not self.has_adapter(name):
            raise AdapterUnknown(name)
        others = tuple(adapter for adapter in self.info_value.adapters if adapter.name != name)
        self.info_value = replace(self.info_value, adapters=others)

    def check_admission(self, owner: str) -> None:
        self.admissions.append(owner)
        if isinstance(self.refusal, Overloaded):
            raise self.refusal

    @contextmanager
    def reserve(self, owner: str) -> Iterator[None]:
        self.reserved.append(owner)
        try:
            yield
        finally:
            self.reserved.remove(owner)

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[PlayedStream]:
        if self.phase == "draining":
            raise Draining()
        if self.refusal is not None:
            raise self.refusal
        if len(request.prompt) > self.info.context - (not request.prefill_only):
            raise ContextTooLong(len(request.prompt), self.info.context)
        self.requests.append(request)
        self.running.add(request.id)
        cut = asyncio.Event()
        self.cut.add(cut)
        try:
            yield PlayedStream(self._play(request, cut))
        finally:
            self.cut.discard(cut)
            self.running.discard(request.id)
            self.left.set()

    @asynccontextmanager
    async def embed(self, job: EmbeddingJob) -> AsyncIterator[PlayedStream]:
        if self.refusal is not None:
            raise self.refusal
        self.jobs.append(job)
        try:
            yield PlayedStream(self._play(Request(job.id, ()), asyncio.Event(), lambda _: self.embeds(job)))
        finally:
            self.left.set()

    async def drain(self, seconds: float) -> None:
        """Like the engine's: waits, then fails the remaining requests."""
        self.phase = "draining"
        deadline = asyncio.get_running_loop().time() + seconds
        while self.running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for cut in self.cut:
            cut.set()

    async def _play(self, request: Request, cut: asyncio.Event, script: Script | None = None) -> AsyncIterator[Event]:
        for item in (script or self.script)(request):
            if isinstance(item, Gate):
                waits = [asyncio.ensure_future(item.wait()), asyncio.ensure_future(cut.wait())]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
                if cut.is_set():
                    yield Failed("the server is shutting down")
                    return
            else:
                yield item
                await asyncio.sleep(0)


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The JSON of each event of a stream, [DONE] as a string."""
        texts = [block.removeprefix(b"data: ") for block in self.body.split(b"\n\n") if block.startswith(b"data: ")]
        return [text.decode() if text == b"[DONE]" else json.loads(text) for text in texts]

    @property
    def named_events(self) -> list[Any]:
        """The events of a stream in which each has its type twice: as its name and in its JSON."""
        found = []
        for block in self.body.decode().split("\n\n")[:-1]:
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
        return found


async def call(
    app: Any,
    method: str,
    path: str,
    *,
    query: str = "",
    json_body: object = None,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One request to an ASGI app, to the end of its answer."""
    content = body if body is not None else b"" if json_body is None else json.dumps(json_body).encode()
    sent = {"host": "localhost", **({} if method == "GET" else {"content-type": "application/json"}), **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
    }
    incoming = iter([{"type": "http.request", "body": content, "more_body": False}])
    outgoing: list[Any] = []
    over = asyncio.Event()

    async def receive() -> Any:
        message = next(incoming, None)
        if message is None:
            await over.wait()
        return message or {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        outgoing.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            over.set()

    await app(scope, receive, send)
    fields = {name.decode(): value.decode() for name, value in outgoing[0]["headers"]}
    return Answer(outgoing[0]["status"], fields, b"".join(message.get("body", b"") for message in outgoing[1:]))


def ask(app: Any, method: str, path: str, **options: Any) -> Answer:
    """`call`, for tests without a loop of their own."""
    return asyncio.run(call(app, method, path, **options))


def settings(**changes: Any) -> Settings:
    """Settings that suit tests: a known name, short waits."""
    limits = ClientLimits(**{"head_seconds": 5.0, "body_seconds": 5.0, **changes.pop("limits", {})})
    return Settings(
        **{"served_names": ("fake", "org/alias"), "store": "memory", "limits": limits, "grace_seconds": 5.0, **changes}
    )


@contextmanager
def serve_in_thread(engine: Any, using: Settings | None = None) -> Iterator[int]:
    """A real server on a free port of 127.0.0.1, which is given. It listens before the thread has started."""
    listening = listen("127.0.0.1", 0)
    lifecycle = Lifecycle(Hosting(engine, using or settings()), using or settings(), print_line=lambda text: None)

    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        engine.start()
        await lifecycle.server.serve(sockets=[listening])

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        if loops:
            loops[0].call_soon_threadsafe(setattr, lifecycle.server, "should_exit", True)
        thread.join(30)
        engine.close()
        listening.close()
