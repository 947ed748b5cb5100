"""The process of a rank other than 0: it loads its part of the model and repeats the forwards of rank 0.

    python -m engine.parallel.worker      with a JobDescription as a line of JSON on its standard input

It ends when its standard input does: the end of rank 0's process, however it ends, closes the pipe.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass, replace
from typing import Any

import transformers

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.load.cache import model_cache
from engine.load.load import LoadedModel, load
from engine.parallel.channel import Channel
from engine.parallel.messages import Geometry, MoveKeys, RepeatForward, StopWorker, decode, geometry_of
from engine.step.input import StepInput
from kvcache.cache import Cache
from kvcache.forward import RepeatedForward

log = logging.getLogger("cellar.engine")

# Rank 0 usually has ended, or has the same error, reports it and ends this process; the time until this process reports
# it and ends.
_ERROR_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class JobDescription:
    """The rank of a worker, the port of the store, and the settings of the engine."""

    rank: int
    port: int
    settings: dict[str, Any]

    @staticmethod
    def of(rank: int, port: int, config: EngineConfig) -> JobDescription:
        """The description for a rank."""
        return JobDescription(rank, port, asdict(config))

    def to_line(self) -> bytes:
        """JSON, with a line end."""
        return json.dumps(asdict(self)).encode() + b"\n"


def main() -> None:
    """Run one worker until rank 0 ends."""
    # The end of an error, before the destructors of the group, which may wait for rank 0.
    atexit.register(os._exit, 1)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Rank 0 drains first.
        signal.signal(number, signal.SIG_IGN)
    job = JobDescription(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_rank_0, name="parent", daemon=True).start()
    logging.basicConfig(level=logging.ERROR, format=f"rank {job.rank}: %(message)s")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = EngineConfig(**job.settings)
    try:
        channel = Channel(job.rank, config.tensor_parallel, job.port, config.device)
        _repeat(channel, config, load(config, lambda phase: None))
        channel.close()
    except (ModelError, RuntimeError) as error:
        threading.Event().wait(_ERROR_SECONDS)
        log.error("%s", error, exc_info=not isinstance(error, ModelError))
        sys.exit(1)
    os._exit(0)


def _end_with_rank_0() -> None:
    # A read of sys.stdin would hold its lock when the interpreter ends.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


def _make_cache(geometry: Geometry, config: EngineConfig, loaded: LoadedModel) -> Cache:
    """A cache of the size of rank 0's, of which only the KV buffers are used."""
    info = replace(loaded.info, slots=geometry.slots, context=geometry.context)
    memory = replace(loaded.memory, cells=geometry.cells)
    sized = replace(loaded, info=info, memory=memory)
    if geometry_of(sized) != geometry:
        log.error("its layers are not those of rank 0: %s", [plan.spec for plan in sized.layers])
        sys.exit(1)
    return model_cache(config, sized)


def _repeat(channel: Channel, config: EngineConfig, loaded: LoadedModel) -> None:
    """Repeat the operations of rank 0 until it stops; the first message is the geometry of its cache."""
    while True:
        match decode(channel.receive()):
            case Geometry() as geometry:
                cache = _make_cache(geometry, config, loaded)
            case RepeatForward() as message:
                _run(loaded, cache, message)
            case MoveKeys(group, old, new, distance):
                cache.groups[group].move_cells(old, new, distance)
            case StopWorker():
                return


def _run(loaded: LoadedModel, cache: Cache, message: RepeatForward) -> None:
    """One forward; its logits equal rank 0's and are not used."""
    forward = RepeatedForward(cache, message.spans, message.cells)
    loaded.runner.run(StepInput(forward, message.tokens, message.logit_rows, message.hidden))


if __name__ == "__main__":
    main()
