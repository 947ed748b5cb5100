"""An HTTP server for openvino-genai's continuous batching: /v1/completions of token ids, streamed.

    python -m venv OTHER && OTHER/bin/pip install openvino-genai uvicorn starlette
    OTHER/bin/python benchmarks/serving/openvino_server.py q8_0.gguf --port 8001 --threads 2

It runs in an environment of its own and imports nothing of this project. Token ids are streamed without decoding, so
the peer is measured without a tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import sys
import threading
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

# Number of the answer, its new tokens, and whether it has ended.
NewTokens = tuple[int, list[int], bool]


def generate(questions: Connection, model: str, threads: int, cache_gib: int) -> None:
    """Load the model and answer (number, prompt, tokens) with NewTokens until the other end closes.

    Runs in a process of its own: the pipeline's step holds the GIL, which would delay the streams by whole steps.
    """
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size, scheduling.enable_prefix_caching = cache_gib, True
    pipeline = genai.ContinuousBatchingPipeline(model, scheduling, "CPU", {"INFERENCE_NUM_THREADS": threads})
    handles: dict[int, Any] = {}
    questions.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            while not handles or questions.poll():
                number, prompt, tokens = questions.recv()
                ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
                handles[number] = pipeline.add_request(number, ids, exactly(tokens))
            pipeline.step()
            for number, handle in list(handles.items()):
                if handle.can_read():
                    questions.send(new_tokens(number, handle))
                    if handle.get_status() != genai.GenerationStatus.RUNNING:
                        del handles[number]


def exactly(tokens: int) -> Any:
    """Return the generation config of a greedy answer with a fixed number of tokens."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
    return config


def new_tokens(number: int, handle: Any) -> NewTokens:
    """Return the new tokens of an answer after a step."""
    tokens = [token for output in handle.read().values() for token in output.generated_ids]
    return number, tokens, handle.get_status() != genai.GenerationStatus.RUNNING


class Answers:
    """Running answers, with a queue for each; None ends one."""

    def __init__(self, questions: Connection) -> None:
        self.questions = questions
        self.queues: dict[int, tuple[asyncio.Queue[list[int] | None], asyncio.AbstractEventLoop]] = {}
        self.numbers = itertools.count()

    def ask(self, prompt: list[int], tokens: int) -> asyncio.Queue[list[int] | None]:
        """Begin an answer with a fixed number of tokens."""
        number, queue = next(self.numbers), asyncio.Queue[list[int] | None]()
        self.queues[number] = queue, asyncio.get_running_loop()
        self.questions.send((number, prompt, tokens))
        return queue

    def hear(self) -> None:
        """Forward tokens to the queues until the process ends; runs in a thread."""
        with contextlib.suppress(EOFError):
            while True:
                number, tokens, over = self.questions.recv()
                queue, loop = self.queues[number]
                loop.call_soon_threadsafe(queue.put_nowait, tokens)
                if over:
                    loop.call_soon_threadsafe(queue.put_nowait, None)
                    del self.queues[number]


def make_app(answers: Answers, name: str) -> Starlette:
    """Return the HTTP application."""

    async def complete(request: Request) -> Response:
        body = await request.json()
        queue = answers.ask(body["prompt"], body["max_tokens"])
        return StreamingResponse(pieces(queue, len(body["prompt"])), media_type="text/event-stream")

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"}]})

    return Starlette(routes=[Route("/v1/completions", complete, methods=["POST"]), Route("/v1/models", models)])


async def pieces(queue: asyncio.Queue[list[int] | None], asked: int) -> AsyncIterator[str]:
    """Yield the events of one answer."""
    count = 0
    while (tokens := await queue.get()) is not None:
        count += len(tokens)
        yield event(choices=[{"index": 0, "text": "".join(f" {token}" for token in tokens), "finish_reason": None}])
    yield event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])
    yield event(choices=[], usage={"prompt_tokens": asked, "completion_tokens": count})
    yield "data: [DONE]\n\n"


def event(**content: Any) -> str:
    """Return one event of the stream."""
    return f"data: {json.dumps(content)}\n\n"


def main() -> int:
    """Load the model, serve it until a signal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="GGUF file, or folder in OpenVINO format")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-gib", type=int, default=4, help="memory for keys and values (default 4)")
    given = parser.parse_args()
    # A forked child would inherit this end of the pipe and never see it close.
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    settings = (theirs, given.model, given.threads, given.cache_gib)
    spawning.Process(target=generate, args=settings, daemon=True).start()
    theirs.close()
    assert ours.recv() == "ready"
    answers = Answers(ours)
    threading.Thread(target=answers.hear, daemon=True).start()
    uvicorn.run(make_app(answers, "openvino"), host="127.0.0.1", port=given.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
