"""Engines without a thread over one loaded model, with other sizes of cache and chunk."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from engine.config import EngineConfig
from engine.core import Core
from engine.draft.loading import make_speculation
from engine.draft.mtp_head import MtpHead
from engine.load.load import LoadedModel
from engine.types.events import Delta, Event, Failed, Finished, Started
from engine.types.request import Request
from engine.verify.comparison import Answer


class CoreFactory:
    """Makes engines over one model and its draft model."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, draft: LoadedModel | MtpHead | None) -> None:
        # Without a latency target, chunks do not depend on the speed of this machine.
        self._config = replace(config, itl_target_ms=0.0, disk_cache=None, overflow="length")
        self._loaded, self._draft = loaded, draft

    @contextmanager
    def open(
        self,
        *,
        context: int,
        slots: int = 1,
        cells: int | None = None,
        chunk: int | None = None,
        drafts: bool = False,
        disk_cache: str | None = None,
    ) -> Iterator[Core]:
        """An engine of these sizes, with the cells of all slots unless `cells` limits them."""
        loaded, chunk = self._loaded, chunk or self._config.chunk
        cells = min(cells or slots * context, loaded.memory.cells)
        sized = replace(
            loaded,
            info=replace(loaded.info, slots=slots, context=context),
            memory=replace(loaded.memory, cells=cells),
        )
        config = replace(
            self._config, context=context, slots=slots, cells=cells, chunk=chunk, disk_cache=disk_cache or "none"
        )
        speculation = make_speculation(config, sized, self._draft, time.monotonic) if drafts else None
        with closing(Core(sized, config, speculation)) as core:
            yield core


def run_together(core: Core, requests: Iterable[Request]) -> dict[str, Answer]:
    """Run requests at the same time; their answers by id."""
    answers: dict[str, Answer] = {}
    for request in requests:
        answers[request.id] = Answer()
        core.submit(request)
    while core.busy:
        for id, event in core.step():
            _record(answers[id], event)
    return answers


def run_alone(core: Core, requests: Iterable[Request]) -> dict[str, Answer]:
    """Run one request after another; their answers by id."""
    return {id: answer for request in requests for id, answer in run_together(core, [request]).items()}


def _record(answer: Answer, event: Event) -> None:
    match event:
        case Started():
            answer.cached_tokens = event.cached_tokens
        case Delta():
            answer.tokens += event.tokens
            answer.logprobs += event.logprobs
        case Finished():
            answer.tokens += event.tokens
            answer.context_shifts = event.usage.context_shifts
        case Failed():
            answer.failure = event.reason
