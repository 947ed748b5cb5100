"""One run of the simulation: a core, its traffic, faults and the history of every request, from one seed.

A run uses the random numbers of its seed alone, and the clock is a number: a seed that fails does so again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from engine.adapters.store import AdapterStore
from engine.config import EngineConfig
from engine.core import Core
from engine.draft.controller import DepthController
from engine.draft.depth import FixedDepth
from engine.draft.forced import ForcedDrafter
from engine.draft.lookup import LookupDrafter
from engine.draft.model import ModelDrafter
from engine.draft.outputs import OutputStore
from engine.draft.speculation import Speculation
from engine.load.load import LoadedModel
from engine.load.plan.memory import STATE_SHARE
from engine.loop import Cancel, EngineLoop, Inspect, Submit
from engine.schedule.draft import DraftRequest
from engine.types.events import Delta, Event, Failed, Finished, PromptScored, Started
from engine.types.request import Request
from engine.types.snapshot import EngineSnapshot
from engine.types.status import MemoryPlan, ModelInfo
from kvcache.attention_group import AttentionGroup
from kvcache.cache import Cache
from tests.simulation.choices import Traffic, configuration
from tests.simulation.faults import HARMLESS, FaultKind, Faults
from tests.simulation.hash_model import HashModel
from tests.simulation.invariants import check_cache, check_core, check_empty
from tests.simulation.letters import END, VOCABULARY, LetterMatcher, LetterTokenizer
from tests.simulation.reference import ExpectedEnd, expected_end
from tests.simulation.runner import HashRunner

# Requests in the engine at once.
_MOST_OPEN = 24
# Steps after the last operation until every request has ended, per token that is left.
_STEPS_PER_TOKEN = 40


class Violation(AssertionError):
    """The engine did something wrong; the message says what."""


@dataclass(slots=True)
class _History:
    """What a client saw of one request."""

    request: Request
    seed: int | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    scored: int = 0
    end: Finished | Failed | None = None
    was_aborted: bool = False


class _FaultyDrafter(ModelDrafter):
    """A draft model that fails when a fault is due."""

    faults: Faults

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        self.faults.raise_if("drafter")
        return super().propose(requests)


class World:
    """Everything that a seed decides."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self._random = Random(seed)
        self._trace = trace
        self.configuration = configuration(self._random)
        self.faults = Faults(self._random)
        self._now = 0.0
        self._histories: dict[str, _History] = {}
        self._open: set[str] = set()
        self._expected: dict[str, ExpectedEnd] = {}
        self._salts: dict[bytes, int] = {}
        self.tokens = self.steps = 0
        # Faults, and ends of requests, by kind.
        self.occurred = Counter[str]()
        self.folder = Path(tempfile.mkdtemp(prefix="simulation-")) if self.configuration.has_disk else None
        self._traffic = Traffic(self._random, self.configuration)
        self._runner = HashRunner(self.configuration.model, self.faults, self._salt_of_slot, self._computed)
        self._draft_caches: list[Cache] = []
        self.core = self._core()
        self._loop = EngineLoop(self.core, None, self._clock_now)
        self._speculation_at_start = self.core._speculation
        for group in self.core.cache.groups[-1:]:
            self._fail_allocations(group)
        self._fail_prefixes(self.core.cache)
        self._fail_commands(self.core)
        if trace:
            trace(repr(self.configuration))

    def run(self, operations: int) -> None:
        """Perform random operations, then run until idle, and check all requests."""
        kinds, weights = zip(*self.configuration.weights.items(), strict=True)
        for kind in self._random.choices(kinds, weights, k=operations):
            if self._trace:
                self._trace(kind)
            was_busy = self.core.busy
            getattr(self, f"_{kind}")()
            if was_busy or self.core.busy or kind in ("evict", "flush"):
                self._check()
        self._finish()

    @property
    def requests(self) -> int:
        """Requests so far."""
        return len(self._histories)

    def close(self) -> None:
        """Remove the files."""
        self.core.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    # Operations

    def _submit(self) -> None:
        for request in self._traffic.requests():
            if len(self._open) >= _MOST_OPEN:
                return
            self._histories[request.id] = _History(request)
            self._open.add(request.id)
            if self._trace:
                self._trace(f"  {request}")
            self._loop.handle(Submit(request, LetterMatcher(self.faults) if request.grammar is not None else None))

    def _abort(self) -> None:
        if self._open:
            name = self._random.choice(sorted(self._open))
            self._histories[name].was_aborted = True
            self.occurred["aborted"] += 1
            self._open.remove(name)
            if self._trace:
                self._trace(f"  {name}")
            self._loop.handle(Cancel(name))

    def _step(self) -> None:
        self._now += 0.001
        if not self.core.busy:
            return
        events = self.core.step()
        for name, event in events:
            self._take(name, event)
        self._check_failures(sum(isinstance(event, Failed) for _, event in events))
        self.steps += 1
        self.occurred.update(self.faults.occurred)
        self.faults.reset()

    def _unread(self) -> None:
        if self._open:
            self.core.set_unread(self._random.choice(sorted(self._open)), self._random.random() < 0.5)

    def _clock(self) -> None:
        self._now += self._random.choice((0.05, 1.0, 3600.0))

    def _evict(self) -> None:
        if self._random.random() < 0.2:
            self.core.cache.reset_prefix_cache()
        else:
            self.core.cache.evict(self._random.randint(1, self.configuration.cells))

    def _flush(self) -> None:
        self.core.flush_when_idle()
        self._inspect()

    def _inspect(self) -> None:
        salt = b"" if self.configuration.salts == 1 else b"salt 0"
        stats, snapshots = self._loop.stats(), list[EngineSnapshot | None]()
        self._loop.handle(Inspect("owner 0", salt, snapshots.append))
        (snapshot,) = snapshots
        if self.faults.occurred:
            return
        if snapshot is None:
            raise Violation("a snapshot failed without a fault")
        if {counts.running + counts.waiting for counts in (stats, snapshot.stats)} != {len(self._open)}:
            raise Violation("a snapshot with another number of requests")

    def _damage(self) -> None:
        """Damage, cut or delete a file of the disk cache, or its whole folder."""
        files = sorted(self.folder.rglob("*")) if self.folder else []
        files = [file for file in files if file.is_file()]
        if not files:
            return
        file, how = self._random.choice(files), self._random.randrange(3)
        content = bytearray(file.read_bytes())
        if how == 0 and self.steps % 8 == 0:
            shutil.rmtree(file.parent)
        elif how == 0 or not content:
            file.unlink()
        elif how == 1:
            file.write_bytes(content[: len(content) // 2])
        else:
            content[self._random.randrange(len(content))] ^= 0x55
            file.write_bytes(content)

    def _fault(self) -> None:
        kind = self._random.choice(self.configuration.faults)
        self.faults.plan(kind)
        if kind in ("request", "queue"):
            self._submit()
        elif kind == "leaving":
            self._abort()
        elif kind in ("snapshot", "statistics"):
            self._inspect()
        self._step()

    # Checks

    def _check(self) -> None:
        for sequence in self.core._sequences.values():
            for salt in sequence.context.salts:
                self._salts[salt] = self._salt(sequence.request.salt)
        if self._runner.violations:
            raise Violation(self._runner.violations[0])
        check_core(self.core, self.configuration.model, self._salts)
        for cache in self._draft_caches:
            check_cache(cache)
        if self._open != set(self.core._sequences):
            raise Violation(f"requests in the engine: {sorted(self._open ^ set(self.core._sequences))} differ")

    def _check_failures(self, failed: int) -> None:
        """Check that a fault failed no other sequence than those that it concerns."""
        limit = sum(kind not in HARMLESS for kind in self.faults.occurred)
        if failed > limit:
            raise Violation(f"{failed} sequences failed, for {self.faults.occurred}")

    def _finish(self) -> None:
        left = sum(2 * self.configuration.capacity + len(self._histories[name].request.prompt) for name in self._open)
        for _ in range(_STEPS_PER_TOKEN * left + 10):
            if not self.core.busy:
                break
            self._step()
            self._check()
        if self.core.busy:
            raise Violation("requests that never end")
        for name, history in self._histories.items():
            if not history.was_aborted and history.end is None:
                raise Violation(f"{name} has no end")
        check_empty(self.core.cache)
        if self.core._speculation is self._speculation_at_start:
            # After a fault nothing releases the slots of drafters, which are dropped as a whole.
            for cache in self._draft_caches:
                check_empty(cache)

    def _take(self, name: str, event: Event) -> None:
        history = self._histories[name]
        if history.was_aborted or history.end is not None:
            raise Violation(f"an event of {name} after its end: {event}")
        if isinstance(event, Started):
            if history.seed is not None:
                raise Violation(f"{name} started twice")
            history.seed = event.seed
        elif isinstance(event, Delta):
            history.tokens += event.tokens
            history.text += event.text
            self._check_tokens(name, history)
        elif isinstance(event, PromptScored):
            history.scored += 1
        elif isinstance(event, Finished | Failed):
            history.end = event
            self.occurred[
                "failed" if isinstance(event, Failed) else event.stop if event.stop == "deadline" else event.reason
            ] += 1
            self._open.remove(name)
            self._check_end(name, history, event)

    def _check_tokens(self, name: str, history: _History) -> ExpectedEnd:
        expected = self._expected.get(name)
        if expected is None:
            config, seed = self.configuration, history.seed
            if seed is None:
                raise Violation(f"{name} has tokens and no start")
            expected = self._expected[name] = expected_end(
                config.model, history.request, seed, capacity=config.capacity, overflow=config.overflow
            )
        if expected.tokens[: len(history.tokens)] != history.tokens:
            raise Violation(f"{name} has tokens {history.tokens}, not {expected.tokens}")
        if not expected.text.startswith(history.text):
            raise Violation(f"{name} has the text {history.text!r}, not {expected.text!r}")
        return expected

    def _check_end(self, name: str, history: _History, end: Finished | Failed) -> None:
        if isinstance(end, Failed):
            if not self.faults.occurred:
                raise Violation(f"{name} failed without a fault: {end.reason}")
            return
        history.tokens += end.tokens
        if end.stop == "deadline":
            return
        expected = self._check_tokens(name, history)
        self.tokens += len(history.tokens)
        seen = (history.tokens, history.text, end.reason, end.stop)
        wanted = (expected.tokens, expected.text, expected.reason, expected.stop)
        if seen != wanted or end.usage.completion_tokens != len(history.tokens):
            raise Violation(f"{name} ended with {seen}, not {wanted}")
        if history.scored != (history.request.score_from is not None):
            raise Violation(f"{name} has {history.scored} scored prompts")
        if self._random.random() < 0.5:
            self._traffic.remember((*history.request.prompt, *history.tokens))

    # Parts of the engine

    def _core(self) -> Core:
        settings = self.configuration
        config = EngineConfig(
            device="cpu",
            context=settings.capacity,
            slots=settings.slots,
            cells=settings.cells,
            chunk=settings.chunk,
            checkpoint=settings.checkpoint,
            overflow=settings.overflow,
            itl_target_ms=0.0,
            drafter="none",
            host_cache_bytes=settings.memory_bytes,
            disk_cache=None if self.folder is None else str(self.folder),
        )
        return Core(self._loaded(), config, self._speculation(config), clock=self._clock_now)

    def _loaded(self) -> LoadedModel:
        settings = self.configuration
        info = ModelInfo("hashes", "", "", "Hashes", 0, "float64", VOCABULARY, settings.capacity, settings.slots)
        memory = MemoryPlan(0, settings.cells, 0, 0, 0, int(settings.state_bytes / STATE_SHARE))
        tokenizer: Any = LetterTokenizer(self.faults)
        grammars: Any = None
        return LoadedModel(
            model=None,
            tokenizer=tokenizer,
            runner=self._runner,
            info=info,
            memory=memory,
            recurrent=settings.model.recurrent,
            dtype=torch.float64,
            kv_dtype=torch.float64,
            eos=frozenset({END}),
            grammars=grammars,
            identity="simulation",
            adapters=AdapterStore(),
        )

    def _speculation(self, config: EngineConfig) -> Speculation | None:
        settings = self.configuration
        if settings.drafting == "none":
            return None
        quick = LookupDrafter(OutputStore(4096)) if settings.drafting in ("lookup", "both") else None
        slow = None
        if settings.drafting != "lookup":
            model = settings.model
            if settings.drafting != "same model":
                model = HashModel(model.seed + 1, VOCABULARY, model.ranges[:1])
            cache = Cache(
                model.specs,
                slots=settings.slots,
                capacity=settings.capacity,
                cells=settings.cells,
                max_batch_tokens=settings.chunk + settings.slots,
                state_bytes=settings.state_bytes if model.recurrent else None,
                dtype=torch.float64,
            )
            self._draft_caches.append(cache)
            runner = HashRunner(model, Faults(self._random), lambda slot: 0, self._computed)
            slow = _FaultyDrafter(cache, runner, vocabulary=VOCABULARY, chunk=settings.chunk)
            slow.faults = self.faults
        depth = DepthController({}) if settings.draft_depth is None else FixedDepth(settings.draft_depth)
        return Speculation(quick, slow, depth, self._clock_now, forced=ForcedDrafter())

    def _fail_allocations(self, group: AttentionGroup) -> None:
        """Let the allocation of the last span fail when a fault is due: those before it have cells already."""
        append = group._extend

        def extend(slot: int, start: int, length: int) -> None:
            self.faults.raise_if("allocation")
            append(slot, start, length)

        group._extend = extend

    def _fail_prefixes(self, cache: Cache) -> None:
        """Let methods of the prefix cache fail when faults are due; copies of the last group, after the others."""
        self._fail_method(cache, "insert_prefix", "insertion")
        self._fail_method(cache, "reuse_prefix", "reuse")
        for group in cache.groups[-1:]:
            self._fail_method(group, "shift", "shift")
            self._fail_method(group.pool, "save", "saving")
            self._fail_method(group.pool, "load", "loading")

    def _fail_commands(self, core: Core) -> None:
        """Let requests fail when they are queued, parts that forget a sequence, snapshots and statistics."""
        self._fail_method(core._scheduler.fairness._requests, "add", "queue")
        leaving = (
            (core._inspection, "record_finished"),
            (core._totals, "record_end"),
            (core._loaded.adapters, "release"),
            (core._speculation, "forget"),
            (core.encoder_inputs, "release"),
        )
        for part, name in leaving:
            self._fail_method(part, name, "leaving", len(leaving))
        self._fail_method(core.cache, "prefix_nodes", "snapshot")
        self._fail_method(core._inspection, "stats", "statistics")

    def _fail_method(self, part: object, name: str, kind: FaultKind, places: int = 1) -> None:
        method = getattr(part, name)

        def fail_or_call(*arguments: Any, **options: Any) -> Any:
            self.faults.raise_if(kind, places)
            return method(*arguments, **options)

        setattr(part, name, fail_or_call)

    def _salt(self, salt: bytes) -> int:
        return 1 + int(salt.split()[-1]) if salt.startswith(b"salt") else hash_of(salt)

    def _salt_of_slot(self, slot: int) -> int:
        return next(
            self._salt(sequence.request.salt) for sequence in self.core._scheduler.running if sequence.slot == slot
        )

    def _computed(self, tokens: int) -> None:
        self._now += 0.0005 + 0.0001 * tokens

    def _clock_now(self) -> float:
        self._now += 1e-6
        return self._now


def hash_of(salt: bytes) -> int:
    """A number for a salt, exact in float64."""
    return int.from_bytes(salt, "big") % (2**31 - 1) + 100


@contextmanager
def world(seed: int, trace: Callable[[str], None] | None = None) -> Iterator[World]:
    """The world of a seed."""
    opened = World(seed, trace)
    try:
        yield opened
    finally:
        opened.close()
