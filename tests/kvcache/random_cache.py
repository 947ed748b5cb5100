"""A cache of any kind under random operations; every slot must hold its computed tokens."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvcache.cache import Cache
from kvcache.errors import OutOfCells
from kvcache.forward import Forward
from kvcache.offload import OffloadConfig
from kvcache.spec import LayerSpec, Span
from tests.kvcache.content import CHUNK, FULL, LONE, STATE, STATE_BYTES, WINDOW, Content, SlotText, rotated
from tests.kvcache.invariants import check_offload, check_slot, check_tree, oldest, resident_length, resume_length

SLOTS, CAPACITY = 4, 40
# Layers, and the recurrent states that fit the budget of the prefix tree; None: no recurrent layers.
KINDS: tuple[tuple[tuple[LayerSpec, ...], int | None], ...] = (
    ((FULL,), None),
    ((FULL, WINDOW), None),
    ((FULL, CHUNK, WINDOW), None),
    ((WINDOW, CHUNK), None),
    ((WINDOW, LONE), None),
    ((), 30),
    ((FULL,), 8),
    ((FULL, WINDOW), 1000),
    ((CHUNK, FULL, WINDOW), 20),
)
SALTS = (b"", b"tenant")


class ForwardFailure(Exception):
    """Raised inside a forward."""


@dataclass(frozen=True, slots=True)
class Part:
    """New tokens of one slot in a forward: the last `draft_tokens` are drafts, and the first `kept` stay."""

    slot: int
    tokens: list[int]
    draft_tokens: int
    kept: int


class RandomCache:
    """A cache over a folder that earlier caches have used; `draw` makes all choices."""

    def __init__(
        self, folder: Path, draw: random.Random, counts: Counter[str] | None = None, device: str = "cpu"
    ) -> None:
        self.folder, self.draw, self.content, self.device = folder, draw, Content(), device
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.layers, self.states = draw.choice(KINDS)
        self.cells = draw.choice((44, 64, 100, 160))
        self.rows = draw.choice((None, 4, 8))
        memory_bytes, disk_bytes = draw.choice((0, 1000, 4000, 10**6)), draw.choice((0, 8000, 10**6))
        self.config = OffloadConfig(memory_bytes, folder if disk_bytes else None, disk_bytes, "model")
        # By salt, all texts inserted so far; and the latest ones.
        self.inserted: dict[bytes, set[tuple[int, ...]]] = {}
        self.latest: deque[SlotText] = deque(maxlen=24)
        self.open()

    def step(self, operation: str) -> None:
        """Run one operation and check every slot."""
        getattr(self, operation)()
        for slot, text in enumerate(self.texts):
            check_slot(self.cache, slot, text, self.content)

    def inspect(self) -> None:
        """Check the tree and the offload tier."""
        check_tree(self.cache, self.content)
        check_offload(self.cache, self.config)

    def close(self) -> None:
        """Check that every cell is free after clear and reset."""
        self.inspect()
        for slot in range(SLOTS):
            self.cache.clear(slot)
        self.cache.reset_prefix_cache()
        for group in self.cache.groups:
            assert not group.pool.reference_counts.any()
            assert group.pool.cells == group.pool.free_cells
        assert self.cache.recurrent_states is None or 0 == self.cache.recurrent_states._held_bytes

    def count(self, operation: str) -> None:
        """Count an operation."""
        self.counts[operation] += 1
        self.counts["operations"] += 1

    def slot(self) -> int:
        """Any slot."""
        return self.draw.randrange(SLOTS)

    def prompt(self) -> list[int]:
        """The start of one of sixteen texts, which diverge after 7, 14, 21 and 28 tokens."""
        variant, length = self.draw.randrange(16), self.draw.randint(1, CAPACITY)
        return [2 * at + (variant >> at // 7 & 1 if at < 28 else 0) for at in range(length)]

    def open(self) -> None:
        """A new cache over the same folder; slots are empty, and content in no file is lost."""
        self.cache = Cache(
            self.layers,
            slots=SLOTS,
            capacity=CAPACITY,
            cells=self.cells,
            max_batch_tokens=self.rows,
            state_bytes=None if self.states is None else self.states * STATE_BYTES,
            offload=self.config,
            dtype=torch.float64,
            device=self.device,
        )
        self.texts = [SlotText() for _ in range(SLOTS)]

    def restart(self) -> None:
        """Restart the process after some content was written."""
        self.count("restart")
        self.save()
        self.open()

    def reopen(self) -> None:
        """Restart the process after all content was written."""
        self.count("restart")
        while self.cache.flush_to_disk(10**9):
            pass
        self.open()

    def request(self) -> None:
        """Serve a prompt: reuse its prefix, compute the rest, insert it, and perhaps keep the slot."""
        slot = self.slot()
        self.empty(slot)
        self.texts[slot].salt = self.draw.choice(SALTS)
        goal = self.prompt()
        self.extend(slot, goal)
        self.compute_missing([(slot, goal)])
        self.insert_text(slot, len(self.texts[slot].tokens))
        if self.draw.random() < 0.6:
            self.empty(slot)

    def reuse_again(self) -> None:
        """Reuse an inserted text under its own salt in an empty slot."""
        if self.latest:
            slot, goal = self.slot(), self.draw.choice(self.latest)
            self.empty(slot)
            self.texts[slot].salt = goal.salt
            self.extend(slot, goal.tokens[: self.draw.randint(1, CAPACITY)])

    def reuse(self) -> None:
        """Extend a slot from the prefix tree."""
        slot = self.slot()
        self.extend(slot, self.texts[slot].tokens + self.prompt()[len(self.texts[slot].tokens) :])

    def feed(self) -> None:
        """Compute tokens of some slots in one forward; some are drafts, some are rejected, and it may fail."""
        slots = self.draw.sample(range(SLOTS), self.draw.randint(1, 3))
        self.compute_missing(
            [(slot, self.texts[slot].tokens + self.prompt()[len(self.texts[slot].tokens) :]) for slot in slots]
        )

    def insert(self) -> None:
        """Insert part of a slot's text."""
        slot = self.slot()
        self.insert_text(slot, self.draw.randint(0, len(self.texts[slot].tokens)))

    def clear(self) -> None:
        """Clear a slot; the tree is unchanged."""
        self.empty(self.slot())

    def fork(self) -> None:
        """Copy the prefix of a slot to another one, or to itself."""
        source, target = self.slot(), self.slot()
        length = self.draw.randint(0, CAPACITY)
        expected = resume_length(self.cache, source, length)
        self.count("copy")
        assert expected == self.cache.copy_prefix(source, target, length)
        self.texts[target] = SlotText(self.texts[source].tokens[:expected], self.texts[source].salt)

    def rewind(self) -> None:
        """Drop the end of a slot."""
        slot = self.slot()
        length = max(len(self.texts[slot].tokens) - self.draw.choice((0, 1, 1, 2, 5, 12)), 0)
        expected = resume_length(self.cache, slot, length)
        self.count("rewind")
        assert expected == self.cache.rewind(slot, length)
        del self.texts[slot].tokens[expected:]

    def shift(self) -> None:
        """Drop tokens of a slot; later tokens move or are dropped too."""
        slot = self.slot()
        text, length = self.texts[slot], len(self.texts[slot].tokens)
        if not length:
            return
        keep = self.draw.randrange(length)
        drop = self.draw.randint(1, length - keep)
        carry = self.draw.random() < 0.7
        below, can_move = resume_length(self.cache, slot, keep), self.can_move(length, keep, drop, carry)
        try:
            cached_length = self.cache.shift(slot, keep, drop, states="carry" if carry else "rebuild")
        except OutOfCells:
            assert can_move
            self.count("shift out of cells")
            return
        self.count("shift" if can_move else "shift without move")
        assert cached_length == (length - drop if can_move else below)
        if can_move:
            self.texts[slot] = self.content.shifted(text, keep, drop)
        else:
            del text.tokens[cached_length:]

    def can_move(self, length: int, keep: int, drop: int, carry: bool) -> bool:
        """Whether a shift moves the later tokens."""
        reaches = [layer.attention_range.limited_to(CAPACITY) for layer in self.layers]
        seen = all(oldest(reach, length) == 0 or oldest(reach, length - drop) >= keep for reach in reaches)
        return seen and (carry or self.states is None) and all(reach.kind != "chunk" for reach in reaches)

    def evict_for(self) -> None:
        """Evict for spans; if they do not fit then, they do not fit with an empty tree either."""
        rows = {slot: CAPACITY - len(self.texts[slot].tokens) for slot in self.draw.sample(range(SLOTS), 2)}
        spans = [Span(slot, CAPACITY - count, self.draw.randint(1, count)) for slot, count in rows.items() if count]
        if spans:
            self.count("evict for")
            missing = self.cache.evict_for(spans)
            if missing:
                self.cache.reset_prefix_cache()
                assert missing == self.cache.evict_for(spans)

    def evict(self) -> None:
        """Evict cells: enough, if the tree has enough."""
        goal, free, evictable = self.draw.randint(1, 60), self.cache.free_cells, self.cache.evictable_cells()
        self.count("evict")
        freed = self.cache.evict(goal)
        assert free + freed == self.cache.free_cells
        assert freed >= min(goal, evictable)

    def reset(self) -> None:
        """Evict all cells of the tree."""
        self.count("reset")
        self.cache.reset_prefix_cache()
        assert self.cache.evictable_cells() == 0

    def save(self) -> None:
        """Write some content: never a file without its prefix in files."""
        self.count("save")
        files = self.cache._tree.offload._files
        before = set(files)
        self.cache.flush_to_disk(self.draw.choice((1, 1, 2000, 10**9)))
        for node in [node for entry in set(files) - before for node in entry.nodes]:
            assert all(
                above.offloaded_tokens == len(above.tokens) and above.written_slices == above.entry_slices
                for above in node.path()[:-1]
            )

    def damage_file(self) -> None:
        """Delete or damage a file."""
        files = sorted(self.folder.rglob("*.safetensors"))
        if not files:
            return
        self.count("damage_file")
        file = self.draw.choice(files)
        data = bytearray(file.read_bytes())
        kind = self.draw.randrange(3)
        if kind == 0:
            file.unlink()
        elif kind == 1:
            file.write_bytes(data[: self.draw.randrange(len(data))])
        else:
            data[self.draw.randrange(len(data))] ^= 1
            file.write_bytes(data)

    def empty(self, slot: int) -> None:
        """Clear a slot, unless it is empty."""
        if self.texts[slot].tokens:
            self.count("clear")
            self.cache.clear(slot)
        self.texts[slot] = SlotText()

    def extend(self, slot: int, goal: list[int]) -> None:
        """Reuse: only inserted tokens, and at least as far as resident content allows."""
        text = self.texts[slot]
        cached_length, there = len(text.tokens), resident_length(self.cache, slot, goal, text.salt)
        self.count("reuse")
        length = self.cache.reuse_prefix(slot, goal, salt=text.salt)
        assert max(cached_length, there) <= length <= max(cached_length, len(goal))
        if length > cached_length:
            self.count("reused" if length == there else "reused from disk")
            assert tuple(goal[:length]) in self.inserted.get(text.salt, ())
            text.tokens = list(goal[:length])

    def insert_text(self, slot: int, length: int) -> None:
        """Insert the first tokens of a slot."""
        text = self.texts[slot]
        tokens = text.tokens[:length]
        self.count("insert")
        self.cache.insert_prefix(slot, tokens, salt=text.salt, checkpoint=self.draw.random() < 0.5)
        self.inserted.setdefault(text.salt, set()).update(tuple(tokens[:some]) for some in range(length + 1))
        self.latest.append(SlotText(tokens, text.salt))

    def compute_missing(self, goal: Sequence[tuple[int, list[int]]]) -> None:
        """Compute the missing tokens of slots in one forward, if they fit."""
        parts = [self.part(slot, tokens[len(self.texts[slot].tokens) :]) for slot, tokens in goal]
        parts = [part for part in parts if part.tokens]
        spans = [
            Span(part.slot, len(self.texts[part.slot].tokens), len(part.tokens), draft_tokens=part.draft_tokens)
            for part in parts
        ]
        if not spans or self.cache.evict_for(spans):
            return
        fails = self.draw.random() < 0.1
        self.count("failed forward" if fails else "forward")
        try:
            with self.cache.forward(spans) as forward:
                self.compute(forward, parts)
                if fails:
                    raise ForwardFailure
        except ForwardFailure:
            return
        for part, span in zip(parts, spans, strict=True):
            stop = span.start + part.kept
            if self.cache.recurrent_states is not None:
                stop = max(at for at in (span.start, *places(span)) if at <= stop)
            assert stop == self.cache.cached_length(part.slot)
            self.texts[part.slot].tokens += part.tokens[: stop - span.start]

    def part(self, slot: int, tokens: list[int]) -> Part:
        """Some new tokens of a slot; half of the time all stay."""
        if not tokens or self.draw.random() < 0.5:
            return Part(slot, tokens, 0, len(tokens))
        draft_tokens = self.draw.randint(0, min(len(tokens) - 1, 4))
        kept = len(tokens) - self.draw.randint(
            0, draft_tokens if draft_tokens and self.draw.random() < 0.8 else len(tokens)
        )
        return Part(slot, tokens, draft_tokens, kept)

    def compute(self, forward: Forward, parts: Sequence[Part]) -> None:
        """Store the rows of a forward, and keep part of each span."""
        before = [self.texts[part.slot] for part in parts]
        every = [
            self.content.numbers(text.salt, (*text.tokens, *part.tokens))
            for text, part in zip(before, parts, strict=True)
        ]
        numbers = np.concatenate([all_[span.start :] for all_, span in zip(every, forward.spans, strict=True)])
        positions = np.concatenate([np.arange(span.start, span.stop) for span in forward.spans])
        keys = torch.from_numpy(rotated(numbers, positions)).to(self.device)
        for layer, spec in enumerate(self.layers):
            values = torch.from_numpy(numbers).to(self.device)[None, :, None].repeat(spec.heads, 1, spec.value_width)
            forward.store_kv(layer, keys[None].repeat(spec.heads, 1, 1), values)
        for span, part, text in zip(forward.spans, parts, before, strict=True):
            self.advance(forward, span, text, part.tokens)
            if part.kept < len(part.tokens):
                self.count("partly kept")
                forward.keep(part.slot, span.start + part.kept)

    def advance(self, forward: Forward, span: Span, text: SlotText, tokens: Sequence[int]) -> None:
        """Read the state before a span and store the states behind its ranges."""
        if self.cache.recurrent_states is None:
            return
        state = forward.recurrent_state(span.slot, span.start, STATE)
        assert (state is None) == (span.start == 0)
        assert state is None or float(state) == self.content.state(text.salt, text.tokens)
        if span.length == 1 and span.start % 3:
            self.advance_in_pool(forward, span, self.content.state(text.salt, (*text.tokens, *tokens)))
            return
        for stop in places(span):
            path = (*text.tokens, *tokens[: stop - span.start])
            state = torch.tensor(self.content.state(text.salt, path), dtype=torch.float64, device=self.device)
            forward.store_recurrent_state(span.slot, stop, STATE, state)

    def advance_in_pool(self, forward: Forward, span: Span, state: float) -> None:
        """The state of one token, as a step on a device reads and writes it."""
        self.count("pooled state")
        (before,), (after,) = forward.token_state_rows([span]).tolist()
        states = forward.pooled_states(STATE)
        current = forward.recurrent_state(span.slot, span.start, STATE)
        assert current is not None
        assert float(states[before]) == float(current)
        states[after] = state


def places(span: Span) -> range:
    """The lengths that a slot may keep after a forward: before each draft token, and behind the last token."""
    return range(span.stop - span.draft_tokens, span.stop + 1)
