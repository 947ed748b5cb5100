"""A subprocess that decodes and processes images and sounds within limits of time and memory.

Decoders are large programs in C that read what strangers send: here a crash, or a file that takes minutes or gigabytes,
ends the subprocess only, and the content is refused.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.errors import InvalidContent, Overloaded
from engine.sandbox import SandboxProcess, limit_memory, limited_time
from engine.text.contents import ProcessedContent
from engine.types.array import Array
from engine.types.content import ContentKind, Upload

# Processor time of one content: the largest image took 1.9 s, an hour of Opus 6.1 s (measured).
_MAX_SECONDS = 30.0
# Beyond the memory of the subprocess before its first content: the largest image took 0.64 GiB (measured).
_MEMORY_BYTES = 2 * 2**30
# A subprocess may be killed by a machine without memory: a content is tried again. After a limit of time or
# a crash it is not: hostile contents would take twice the processor time.
_ATTEMPTS = 2
_LOCK_TIMEOUT_SECONDS = 60.0
_RETRY_SECONDS = 5.0
_NICE_INCREMENT = 5
_ENDED = (EOFError, BrokenPipeError, ConnectionResetError)


class SandboxUnavailable(Exception):
    """The subprocess has no processor; the text is the reason."""


@dataclass(frozen=True, slots=True)
class MediaDescription:
    """What a processor reads: the attributes of MediaProcessor."""

    markers: Mapping[ContentKind, str]
    placeholders: frozenset[int]
    refused: Mapping[ContentKind, str]


class _FifoLock:
    """A lock that threads get in the order of their arrival.

    Of other locks a thread with several contents takes the next turn, too: the threads of other requests would wait
    for all of them.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        # The first holds the lock.
        self._turns: deque[threading.Event] = deque()

    def acquire(self, timeout_seconds: float | None = None) -> bool:
        """Whether the lock was acquired in time."""
        turn = threading.Event()
        with self._guard:
            self._turns.append(turn)
            self._turns[0].set()
        if turn.wait(timeout_seconds):
            return True
        with self._guard:
            if turn.is_set():
                return True
            self._turns.remove(turn)
            return False

    def release(self) -> None:
        """Pass the lock on."""
        with self._guard:
            self._turns.popleft()
            if self._turns:
                self._turns[0].set()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class MediaSandbox:
    """The subprocess, started on demand. For any thread; one content at a time, in order of arrival.

    folder        with the files of the processor
    reads_speech  whether sounds are features for transcription, rather than contents of prompts
    max_seconds   processor time of a content
    memory_bytes  of the subprocess, beyond its memory at the start
    """

    def __init__(
        self,
        folder: Path,
        *,
        reads_speech: bool = False,
        max_seconds: float = _MAX_SECONDS,
        memory_bytes: int = _MEMORY_BYTES,
    ) -> None:
        self._arguments = folder, max_seconds, memory_bytes, "speech" if reads_speech else "contents"
        self._lock = _FifoLock()
        self._process = SandboxProcess(__name__)
        self._is_ready = False
        self._description: MediaDescription | None = None

    def start(self) -> None:
        """Start the subprocess if it does not run, without a wait for its imports."""
        with self._lock:
            self._connect()

    @property
    def markers(self) -> Mapping[ContentKind, str]:
        """What a chat template writes for a content, by kind. Raises SandboxUnavailable."""
        return self.describe().markers

    @property
    def placeholders(self) -> frozenset[int]:
        """Tokens that the model replaces by features. Raises SandboxUnavailable."""
        return self.describe().placeholders

    def describe(self) -> MediaDescription:
        """What the processor of the checkpoint reads. Raises SandboxUnavailable."""
        with self._lock:
            if self._description is None:
                try:
                    self._ready_pipe()
                except (*_ENDED, TimeoutError) as error:
                    raise SandboxUnavailable("its processor does not start") from error
            assert self._description is not None
            return self._description

    def process(self, upload: Upload) -> ProcessedContent:
        """Decode and process a content. Raises InvalidContent, and Overloaded."""
        if not self._lock.acquire(_LOCK_TIMEOUT_SECONDS):
            raise Overloaded(1, _RETRY_SECONDS)
        try:
            for _ in range(_ATTEMPTS):
                try:
                    return self._process_once(upload)
                except _ENDED:
                    was_killed = self._process.was_killed()
                    self._process.close()
                    if not was_killed:
                        break
        except (TimeoutError, SandboxUnavailable) as error:
            raise Overloaded(1, _RETRY_SECONDS) from error
        finally:
            self._lock.release()
        raise InvalidContent(upload.field, "it takes too much time or memory to decode", "too_large")

    def close(self) -> None:
        """End the subprocess; the next content starts another one."""
        self._process.close()

    def _process_once(self, upload: Upload) -> ProcessedContent:
        pipe = self._ready_pipe()
        pipe.send_bytes(json.dumps([upload.kind, upload.detail, upload.max_pixels]).encode())
        pipe.send_bytes(upload.data)
        answer = json.loads(self._process.receive())
        if "reason" in answer:
            raise InvalidContent(upload.field, answer["reason"], answer["problem"])
        arrays = tuple(
            (name, Array(dtype, tuple(shape), self._process.receive())) for name, dtype, shape in answer["arrays"]
        )
        digest = bytes.fromhex(answer["digest"])
        return ProcessedContent(upload.kind, answer["replacement"], arrays, digest, answer["pixels"])

    def _connect(self) -> Connection:
        pipe, is_new = self._process.connect(*self._arguments)
        self._is_ready = self._is_ready and not is_new
        return pipe

    def _ready_pipe(self) -> Connection:
        pipe = self._connect()
        if not self._is_ready:
            first = json.loads(self._process.receive())
            if "unavailable" in first:
                raise SandboxUnavailable(first["unavailable"])
            self._description = MediaDescription(first["markers"], frozenset(first["placeholders"]), first["refused"])
            self._is_ready = True
        return pipe


def serve(pipe: Connection, folder: str, max_seconds: str, memory_bytes: str, purpose: str) -> None:
    """The main loop of the subprocess, until its pipe is closed or a content exceeds a limit."""
    os.nice(_NICE_INCREMENT)
    processor = _read_processor(Path(folder), purpose)
    if isinstance(processor, str):
        pipe.send_bytes(json.dumps({"unavailable": processor}).encode())
        return
    described = {"markers": processor.markers, "placeholders": [*processor.placeholders], "refused": processor.refused}
    pipe.send_bytes(json.dumps(described).encode())
    limit_memory(int(memory_bytes))
    while True:
        try:
            kind, detail, max_pixels = json.loads(pipe.recv_bytes())
            data = pipe.recv_bytes()
        except EOFError:
            return
        with limited_time(float(max_seconds)):
            answer, arrays = _answer(processor, Upload(kind, data, "", detail, max_pixels))
        pipe.send_bytes(json.dumps(answer).encode())
        for array in arrays:
            pipe.send_bytes(array)


def _read_processor(folder: Path, purpose: str) -> Any:
    """The processor of a checkpoint, or why there is none."""
    warnings.simplefilter("ignore")
    logging.disable()
    try:
        # Only the subprocess imports decoders and transformers' processors.
        from engine.media.processor import MediaProcessor
        from engine.media.read_processor import read_processor
        from engine.media.speech import SpeechProcessor

        if purpose == "speech":
            return SpeechProcessor.read(folder)
        return MediaProcessor(read_processor(folder))
    except Exception as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__


def _answer(processor: Any, upload: Upload) -> tuple[dict[str, object], list[bytes]]:
    """The header of an answer, and the arrays that follow it."""
    try:
        content = processor.process(upload)
    except InvalidContent as error:
        return {"reason": error.reason, "problem": error.problem}, []
    except MemoryError:
        return {"reason": "it takes too much memory to decode", "problem": "too_large"}, []
    except Exception as error:
        # Decoders raise errors of many types; the end of the subprocess would delay other requests by its start.
        return {"reason": f"it cannot be decoded ({type(error).__name__})", "problem": "damaged"}, []
    header = [(name, array.dtype, array.shape) for name, array in content.arrays]
    numbers = {"digest": content.digest.hex(), "pixels": content.pixels}
    described = {"replacement": content.replacement, "arrays": header, **numbers}
    return described, [array.data for _, array in content.arrays]
