"""Messages between processes: what arrives equals what was sent, and anything else is refused."""

from __future__ import annotations

import asyncio
import inspect
import random
import socket
import struct

import msgspec
import pytest

from engine import errors
from engine.chat_format.detection import AddedVocabulary, ChatFormatSource, chat_format_source, detect_chat_format
from engine.config import EngineConfig
from engine.errors import ContextTooLong, EngineError, InvalidContent, InvalidRequest, PlanTooLarge
from engine.remote import messages
from engine.remote.connection import MAX_MESSAGE_BYTES, InvalidMessage, MessageConnection, frame
from engine.remote.error_message import ErrorMessage, UnknownError, to_error, to_message
from engine.remote.invocations import Encode, RenderChat, result_type, to_bytes, to_text
from engine.types.array import Array
from engine.types.content import Content, Upload
from engine.types.events import (
    Delta,
    Embedded,
    Event,
    Failed,
    Finished,
    Logprob,
    PrefillProgress,
    PromptScored,
    Started,
    Timings,
    TokenLogprob,
    Usage,
)
from engine.types.request import (
    Dry,
    EmbeddingInput,
    EmbeddingJob,
    Grammar,
    Media,
    ReasoningLimit,
    RenderedPrompt,
    Request,
    SamplingParams,
    SpeculationParams,
    Xtc,
)
from engine.types.status import Stats

LOGPROB = Logprob(5, "é\n", b"\xc3", -0.1, in_output=False)
ENTRY = TokenLogprob(LOGPROB, (LOGPROB, LOGPROB), (LOGPROB,), 3)
EVENTS: list[Event] = [
    Started(3, 2, 2**63),
    PrefillProgress(1, 3),
    PromptScored((1, 2), (None, ENTRY)),
    Embedded(b"\x00\x01\xff"),
    Delta("text \N{SNOWMAN}", (1, 2**40), (ENTRY,)),
    Finished("stop", 7, Usage(1, 2, 3), Timings(0.1, 0.2, float("inf")), ENTRY, (9,)),
    Finished("length", "deadline", Usage(1, 2, 3), Timings(0.1, 0.2, 0.3)),
    Failed("a reason", caused_by_request=True),
]
PICTURE = Array("float32", (1, 2), bytes(range(8)))
UPLOAD = Upload("image", bytes(range(256)), "messages[0]", "low")
REQUEST = Request(
    "id",
    (1, 2, 3),
    SamplingParams(0.5, seed=2**63, dry=Dry(1.0, breakers=(1,)), xtc=Xtc(0.5), logit_bias=((1, -float("inf")),)),
    stop=("a", ""),
    protected=((0, 1),),
    salt=b"\xff\x00",
    media=Media((("pixels", PICTURE),), b"digest"),
    speculation=SpeculationParams("lookup", 3),
    grammar=Grammar('start: "a"'),
    reasoning_limit=ReasoningLimit(None, (1, 2), 3),
)


def sample_errors() -> list[EngineError]:
    """An error of each class, with a value for each parameter of its constructor."""
    values: dict[str, object] = {
        "field": "messages[1]",
        "reason": "a reason: é",
        "problem": "too_large",
        "plan": PlanTooLarge(2**40, 2**30, "use less"),
        "exact": False,
        **dict.fromkeys(("retry_after_seconds", "timeout_seconds", "wait_seconds"), 2.5),
        **dict.fromkeys(("needed_bytes", "available_bytes", "tokens", "capacity", "max_context", "waiting"), 77),
        **dict.fromkeys(("size", "used", "limit", "count", "max_count"), 78),
    }
    return [
        _sample(kind, values)
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, EngineError)
    ]


def _sample(kind: type[EngineError], values: dict[str, object]) -> EngineError:
    names = [*inspect.signature(kind.__init__).parameters][1:]
    if names == ["args", "kwargs"]:
        return kind("words: é")
    return kind(**{name: values.get(name, name) for name in names})


@pytest.mark.parametrize("error", sample_errors(), ids=lambda error: type(error).__name__)
def test_every_error_arrives_as_it_was_raised(error: EngineError) -> None:
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(to_message(error)), type=ErrorMessage)
    arrived = to_error(message)
    assert (type(arrived), str(arrived)) == (type(error), str(error))
    for name, value in vars(error).items():
        received = getattr(arrived, name)
        assert str(received) == str(value)
        assert type(received) is type(value)


def test_the_sample_has_every_class_of_the_module() -> None:
    names = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, EngineError)}
    assert {type(error).__name__ for error in sample_errors()} == names
    assert len(names) > 20


def test_an_error_of_another_module_arrives_as_its_base_class() -> None:
    class TooBlue(InvalidRequest):
        pass

    assert to_message(TooBlue("color", "too blue")) == to_message(InvalidRequest("color", "too blue"))


@pytest.mark.parametrize(
    "message",
    [
        ErrorMessage("SystemExit", {}),
        ErrorMessage("InvalidRequest", {"field": "a"}),
        ErrorMessage("Draining", {"reason": "a"}),
    ],
)
def test_no_other_class_is_made_of_a_message(message: ErrorMessage) -> None:
    with pytest.raises(UnknownError):
        to_error(message)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_event_arrives(event: Event) -> None:
    batch = messages.Batch((messages.stream_event(7, event),), Stats(running=1))
    assert messages.decode_reply(messages.encode(batch)[4:]) == batch


@pytest.mark.parametrize(
    "command",
    [
        messages.LoadModel(EngineConfig(model="a", itl_target_ms=50.0, lora=("a=b",), memory="40%")),
        messages.OpenStream(1, REQUEST),
        messages.EmbedTexts(2, EmbeddingJob("id", (EmbeddingInput((1, 2), (0, 1), 1),))),
        messages.CancelStream(3),
        messages.SetStreamUnread(4, True),
        messages.Invoke(5, Encode(to_bytes("half \ud800"), True)),
        messages.Invoke(6, RenderChat("[]", "[]", True, False, "{}", ((1, 2),), (UPLOAD,))),
        messages.TakeSnapshot(7, "owner", b"\xff"),
        messages.DrainEngine(8, 1.5),
        messages.LoadRemoteAdapter(9, "name", "folder/name", False),
        messages.UnloadRemoteAdapter("name"),
    ],
    ids=lambda command: type(command).__name__,
)
def test_every_command_arrives(command: messages.Command) -> None:
    arrived = messages.decode_command(messages.encode(command)[4:])
    assert arrived == command
    assert messages.encode(arrived) == messages.encode(command)


def test_contents_and_uploads_cross() -> None:
    """Images in a prompt: as the client sent them, and as arrays."""
    prompt = RenderedPrompt((1, 2), contents=(Content("image", 0, 2, b"digest", (("pixels", PICTURE),)),))
    for value in (prompt, UPLOAD):
        assert messages.decode(messages.encode_value(value), type(value)) == value


def test_text_with_half_of_a_surrogate_pair_crosses() -> None:
    text = "\ud83d a \udc00"
    assert to_text(to_bytes(text)) == text


def test_results_have_the_type_of_the_method() -> None:
    assert result_type(Encode) == list[int]
    assert result_type(RenderChat) is RenderedPrompt


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x91\xa3abc", b"\x92\xa6Cancel\x01", b"\xa4text", b"\x91" * 5000])
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(InvalidMessage):
        messages.decode_command(content)
    with pytest.raises(InvalidMessage):
        messages.decode_reply(content)


def test_damaged_messages_are_refused_or_are_messages() -> None:
    """Never another exception, whichever byte is wrong."""
    random.seed(5)
    content = messages.encode(messages.OpenStream(1, REQUEST))[4:]
    for _ in range(2000):
        damaged = bytearray(content)
        damaged[random.randrange(len(damaged))] = random.randrange(256)
        try:
            messages.decode_command(bytes(damaged[: random.randrange(1, len(damaged) + 1)]))
        except InvalidMessage:
            continue


def test_a_chat_format_is_detected_again() -> None:
    words = {"<think>": 7, "</think>": 8, "<tool_call>": 9, "</tool_call>": 10}
    vocabulary = AddedVocabulary(
        words, frozenset({"<think>"}), lambda text: [words.get(text, 1), *([] if text in words else [2])]
    )
    template = '<think></think><tool_call>\n{"name": </tool_call>'
    source = chat_format_source(template, vocabulary)
    crossed = messages.decode(messages.encode_value(source), ChatFormatSource)
    assert crossed.detect() == detect_chat_format(template, vocabulary)
    assert crossed.detect().supports_reasoning


class Ends:
    """A connection and the raw socket of its other end."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.lost: list[InvalidMessage | None] = []
        self.ended = asyncio.Event()

    async def open(self) -> socket.socket:
        near, far = socket.socketpair()
        self.connection = MessageConnection(self.received.append, self._end)
        await asyncio.get_running_loop().create_connection(lambda: self.connection, sock=near)
        return far

    def _end(self, error: InvalidMessage | None) -> None:
        self.lost.append(error)
        self.ended.set()


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_messages_arrive_whole_however_the_bytes_are_cut(chunk: int) -> None:
    contents = [b"", b"a", bytes(1000), b"end"]
    data = b"".join(map(frame, contents))

    async def story() -> Ends:
        ends = Ends()
        far = await ends.open()
        for start in range(0, len(data), chunk):
            far.sendall(data[start : start + chunk])
            await asyncio.sleep(0)
        # Half a message is dropped.
        far.sendall(frame(b"half")[:5])
        far.close()
        await asyncio.wait_for(ends.ended.wait(), 5)
        return ends

    ends = asyncio.run(story())
    assert ends.received == contents
    assert ends.lost == [None]


def test_a_length_beyond_the_limit_closes_the_connection() -> None:
    async def story() -> Ends:
        ends = Ends()
        far = await ends.open()
        far.sendall(frame(b"first") + struct.pack("!I", MAX_MESSAGE_BYTES + 1))
        await asyncio.wait_for(ends.ended.wait(), 5)
        assert far.recv(1) == b""
        far.close()
        return ends

    ends = asyncio.run(story())
    assert ends.received == [b"first"]
    assert isinstance(ends.lost[0], InvalidMessage)


def test_a_reader_that_is_slow_is_noticed() -> None:
    async def story() -> None:
        ends = Ends()
        far = await ends.open()
        for _ in range(100):
            ends.connection.send(frame(bytes(10_000)))
        assert not ends.connection.writable.is_set()
        far.setblocking(False)
        while not ends.connection.writable.is_set():
            await asyncio.sleep(0.001)
            far.recv(1_000_000)
        far.close()
        await asyncio.wait_for(ends.ended.wait(), 5)

    asyncio.run(asyncio.wait_for(story(), 10))


def test_errors_keep_their_fields() -> None:
    too_long = to_error(to_message(ContextTooLong(9, 8, exact=False, max_context=16)))
    assert isinstance(too_long, ContextTooLong)
    assert (too_long.tokens, too_long.exact, too_long.max_context) == (9, False, 16)
    content = to_error(to_message(InvalidContent("a", "b", "format")))
    assert isinstance(content, InvalidContent)
    assert content.problem == "format"
