"""The worker processes of rank 0, and the end of the engine when one of them ends.

A thread for each worker waits for the end of its process. The end of a worker closes its connections, so rank 0 never
waits long for its part of a forward.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from engine.config import EngineConfig
from engine.errors import EngineDead, ModelError
from engine.parallel.channel import Channel, listen
from engine.parallel.messages import Message, StopWorker, encode
from engine.parallel.worker import JobDescription

# An error of rank 0 itself, which ends the workers, is reported rather than their end.
_REPORT_SECONDS = 1.0
_EXIT_CODE_SECONDS = 0.5
# For workers to leave the group after a StopWorker.
_STOP_SECONDS = 2.0


class Workers:
    """The processes of the ranks from 1 on, and the channel to them. Belongs to the engine thread.

    on_lost  called once, in another thread, with the reason when the workers cannot continue
    """

    def __init__(self, config: EngineConfig, on_lost: Callable[[str], None]) -> None:
        """Start the processes."""
        self._on_lost = on_lost
        self._closing, self._stopped = threading.Event(), threading.Event()
        self._losing = threading.Lock()
        self.lost_reason: str | None = None
        self._config, self._listening = config, listen()
        self._channel: Channel | None = None
        port, ranks = self._listening.getsockname()[1], range(1, config.tensor_parallel)
        self._processes = {rank: _start(JobDescription.of(rank, port, config)) for rank in ranks}
        for rank in ranks:
            threading.Thread(target=self._watch, args=(rank,), name=f"rank {rank}", daemon=True).start()

    def join(self) -> None:
        """Wait until all processes have started."""
        port = self._listening.getsockname()[1]
        ranks, device = self._config.tensor_parallel, self._config.device
        self._channel = Channel(0, ranks, port, device, listening=self._listening, stop=self._stopped)

    @property
    def sent_bytes(self) -> int:
        """Bytes of all messages to each worker."""
        return self._joined.sent_bytes

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids, by rank."""
        return tuple(process.pid for process in self._processes.values())

    def send(self, message: Message) -> None:
        """Broadcast a message."""
        self._joined.send(encode(message))

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """All ranks run the block in step. An exception in it, or before it, ends the workers and the engine."""
        if self.lost_reason is not None:
            raise EngineDead(self.lost_reason)
        done = False
        try:
            yield
            done = True
        finally:
            if not done:
                self._lose(self.end_reason() or "a step failed on rank 0, which left the ranks out of step")

    def end_reason(self) -> str | None:
        """Why the workers cannot continue; None: they can."""
        for rank, process in self._processes.items():
            with suppress(subprocess.TimeoutExpired):
                # The connections of an ended process are closed before its exit code is there.
                return self.lost_reason or _end_text(rank, process.wait(_EXIT_CODE_SECONDS))
        return self.lost_reason

    def close(self) -> None:
        """End the processes, by a StopWorker if they are in step with rank 0."""
        self._closing.set()
        if self.lost_reason is None and self._channel is not None:
            with suppress(RuntimeError):
                self.send(StopWorker())
                self._wait()
        self._kill()
        self._wait()
        if self._channel is not None:
            self._channel.close()

    def _wait(self) -> None:
        """Wait for the ends of the processes, for a while."""
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)

    @property
    def _joined(self) -> Channel:
        assert self._channel is not None, "the workers have joined"
        return self._channel

    def _watch(self, rank: int) -> None:
        reason = _end_text(rank, self._processes[rank].wait())
        if not self._closing.wait(_REPORT_SECONDS):
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        with self._losing:
            if self.lost_reason is not None:
                return
            self.lost_reason = reason
        self._stopped.set()
        self._kill()
        self._on_lost(reason)

    def _kill(self) -> None:
        """End all processes: a collective with an ended rank fails, instead of waiting."""
        for process in self._processes.values():
            process.kill()
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()


@contextmanager
def started(config: EngineConfig, on_lost: Callable[[str], None]) -> Iterator[Workers]:
    """The workers for a config, which end with the block.

    An error in the block that follows from the end of a worker is replaced by EngineDead.
    """
    workers = Workers(config, on_lost)
    try:
        workers.join()
        yield workers
    except (ModelError, RuntimeError) as error:
        if (reason := workers.end_reason()) is not None:
            raise EngineDead(reason) from error
        raise
    finally:
        workers.close()


def _end_text(rank: int, code: int) -> str:
    return f"the process of rank {rank} ended with code {code}"


def _start(job: JobDescription) -> subprocess.Popen[bytes]:
    """A worker that imports the modules of this process, and is not in the process group that a terminal interrupts."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    command = [sys.executable, "-P", "-m", "engine.parallel.worker"]
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, process_group=0)
    assert process.stdin is not None, "a pipe"
    process.stdin.write(job.to_line())
    process.stdin.flush()
    return process
