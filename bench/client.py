"""Sends one request and, when there is time, reads its streamed answer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import h11
import httpx

from bench.recording import Recording, record
from bench.samples import OK, Sample

# Roles and texts of a conversation, or the token ids of a completion.
Chat = tuple[tuple[str, str], ...]
Prompt = Chat | list[int]
PROBLEM_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Server:
    """A server: `name` for the tables, `url` ends in /v1, `context` is None if unknown."""

    name: str
    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    context: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        # Compressed events would arrive in lumps.
        always = {"Accept-Encoding": "identity"}
        return always | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What every request asks for besides its prompt. `extra` is laid over the body; null takes a field out of it."""

    timeout_seconds: float
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, model: str, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        """The JSON body of one streamed request."""
        body = {
            "model": model,
            **prompt_fields(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return {name: value for name, value in {**body, **self.extra}.items() if value is not None}


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """The fields of the body that hold the prompt."""
    if isinstance(prompt, list):
        return {"prompt": prompt}
    return {"messages": [{"role": role, "content": text} for role, text in prompt]}


@dataclass(slots=True)
class StreamedAnswer:
    """An answer while it arrives; seconds since it was asked for.

    It is whole after a finish_reason or [DONE]: usage comes behind the first, and some servers never send the second.
    """

    arrivals: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    outcome: str = "cut"
    text: str = ""

    def parse_line(self, line: bytes, seconds: float) -> None:
        """Read one line of the event stream; ValueError or AttributeError where it is none."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.outcome = self.outcome if self.outcome == "error event" else OK
            return
        event = json.loads(data)
        if event.get("error"):
            self.fail("error event", data)
            return
        choices = event.get("choices") or []
        if any(choice.get("finish_reason") for choice in choices):
            self.outcome = OK
        self.usage = event.get("usage") or self.usage
        deltas = [choice.get("delta") or choice for choice in choices]
        if any(has_text(delta) for delta in deltas):
            self.arrivals.append(seconds)
        self.text += "".join(delta.get("content") or delta.get("text") or "" for delta in deltas)

    def fail(self, outcome: str, text: bytes) -> None:
        """Record an outcome and the server's error text."""
        self.outcome = outcome
        self.text = text[:PROBLEM_LENGTH].decode("utf-8", "replace")

    def sample(self, *, asked_tokens: int, sent: float, finished: float) -> Sample:
        """What came of it."""
        usage = self.usage
        return Sample(
            outcome=self.outcome,
            sent=sent,
            arrivals=tuple(self.arrivals),
            finished=finished,
            asked_tokens=asked_tokens,
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens") or len(self.arrivals),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            counted_by="usage" if usage.get("completion_tokens") else "chunks",
            text=self.text,
        )


def has_text(delta: dict[str, Any]) -> bool:
    """Whether a delta, or a choice of a completion, carries what the model wrote; often the first has only a role."""
    return any(delta.get(name) for name in ("content", "text", "reasoning_content", "reasoning", "tool_calls"))


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request with a complete answer that is not parsed yet.

    begun, moment  when its run began, and when it was sent, by time.perf_counter
    """

    recording: Recording
    asked_tokens: int
    begun: float
    moment: float

    def read(self) -> Sample:
        """The sample; errors are outcomes, not exceptions."""
        answer = StreamedAnswer()
        try:
            self._read(answer)
        except h11.RemoteProtocolError as error:
            answer.fail("connection", repr(error).encode())
        except (ValueError, AttributeError) as error:
            answer.fail("unreadable event", repr(error).encode())
        finished = self.recording.ended - self.moment
        return answer.sample(asked_tokens=self.asked_tokens, sent=self.moment - self.begun, finished=finished)

    def _read(self, answer: StreamedAnswer) -> None:
        status, pieces = self.recording.opened()
        if status == 200:
            for line, moment in lines(pieces):
                answer.parse_line(line, moment - self.moment)
        elif status is not None:
            answer.fail(f"http {status}", b"".join(data for _, data in pieces))
        match self.recording.problem:
            case "timeout":
                answer.outcome = "timeout"
            case "connection":
                answer.fail("connection", self.recording.reason.encode())


async def send(
    server: Server, options: RequestOptions, *, prompt: Prompt, max_tokens: int, begun: float
) -> SentRequest:
    """Send one request and record its answer to the end."""
    moment = time.perf_counter()
    url = server.url + ("/completions" if isinstance(prompt, list) else "/chat/completions")
    body = options.body(server.model, prompt, max_tokens)
    request = httpx.Request("POST", url, json=body, headers=server.headers)
    return SentRequest(await record(request, options.timeout_seconds), max_tokens, begun, moment)


def lines(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[bytes, float]]:
    """Yield every line with the time at which its last byte was read from the socket."""
    rest = b""
    for moment, piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line, moment
