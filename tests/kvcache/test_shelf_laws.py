"""Any order of computing, remembering, evicting, saving and restarting: what is recalled is what was computed.

Content echoes its own tokens (tests/kvcache/echo.py), so a slot, a node or a file that has anything else is found out.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from kvcache import prefix, shelf
from kvcache.cache import Cache
from kvcache.node import Node
from kvcache.shelf import ShelfConfig
from kvcache.spec import Span
from tests.kvcache.echo import CHUNK, FULL, WINDOW, check, digests, echo, feed, make, no_leak

SLOTS, CAPACITY = 3, 40
KINDS = (((FULL,), None), ((FULL, WINDOW), None), ((CHUNK, FULL, WINDOW), 10**6), ((WINDOW, CHUNK), None))
SALTS = (b"", b"tenant")
# How often each operation comes; prompts most often, for the rest needs something to work on.
WEIGHTS = {
    "request": 12,
    "feed": 2,
    "remember": 2,
    "recall": 6,
    "clear": 3,
    "evict": 4,
    "forget": 1,
    "save": 4,
    "reopen": 1,
    "restart": 1,
    "lose": 1,
}


class History:
    """A cache over a folder that other caches had before, and a list for each slot; `draw` decides what happens."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder, self.draw = folder, draw
        self.remembered: dict[bytes, set[tuple[int, ...]]] = {salt: set() for salt in SALTS}
        self.kind, self.cells = draw.choice(KINDS), draw.choice((44, 60, 90))
        memory_bytes, disk_bytes = draw.choice((0, 1000, 4000, 10**6)), draw.choice((0, 6000, 10**6))
        self.config = ShelfConfig(memory_bytes, folder if disk_bytes else None, disk_bytes, "model")
        self.restart()

    def play(self, steps: int) -> Counter[str]:
        """Do so many things, and check everything after each; how often each was done."""
        done = Counter(self.draw.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()), k=steps))
        for operation in self.draw.sample(list(done.elements()), steps):
            getattr(self, operation)()
            self.slots_hold_their_tokens()
            self.nodes_hold_their_edges()
            self.the_shelf_adds_up()
            self.parents_were_used_later()
        self.close()
        return done

    def slot(self) -> int:
        """Any slot."""
        return self.draw.randrange(SLOTS)

    def prompt(self) -> list[int]:
        """One of sixteen texts, which part after 7, 14, 21 and 28 tokens, up to any length."""
        variant, length = self.draw.randrange(16), self.draw.randint(1, CAPACITY)
        return [2 * at + (variant >> at // 7 & 1 if at < 28 else 0) for at in range(length)]

    def reopen(self) -> None:
        """Save all and restart."""
        while self.cache.save_some(10**9):
            pass
        self.restart()

    def restart(self) -> None:
        """Open a new cache over the same folder; all slots are empty, and what was in no file is gone."""
        layers, state_bytes = self.kind
        self.cache: Cache = make(
            *layers, slots=SLOTS, capacity=CAPACITY, cells=self.cells, state_bytes=state_bytes, shelf=self.config
        )
        self.content: list[list[int]] = [[] for _ in range(SLOTS)]
        self.salt = [b""] * SLOTS

    def request(self) -> None:
        """Serve a prompt: recall what there is, compute the rest, remember it, and perhaps stay in the slot."""
        slot, prompt, seal = self.slot(), self.prompt(), self.draw.random() < 0.5
        self.empty(slot)
        self.extend(slot, prompt)
        self.compute(slot, prompt)
        self.hold(slot, len(self.content[slot]), seal=seal)
        if self.draw.random() < 0.6:
            self.empty(slot)

    def feed(self) -> None:
        """Compute some tokens."""
        self.compute(self.slot(), self.prompt())

    def remember(self) -> None:
        """Let others have some of what a slot computed."""
        slot = self.slot()
        self.hold(slot, self.draw.randint(0, len(self.content[slot])), seal=self.draw.random() < 0.5)

    def recall(self) -> None:
        """Extend a slot, or begin one anew."""
        slot = self.slot()
        if self.draw.random() < 0.7:
            self.empty(slot)
        self.extend(slot, self.prompt())

    def clear(self) -> None:
        """Empty a slot; what is remembered stays."""
        self.empty(self.slot())

    def evict(self) -> None:
        """Take cells from the tree: enough, if it has enough."""
        wanted, free, idle = self.draw.randint(1, 60), self.cache.free_cells, self.cache.idle_cells()

        assert self.cache.evict(wanted) >= min(wanted, idle)
        assert free + min(wanted, idle) <= self.cache.free_cells

    def forget(self) -> None:
        """Take all cells from the tree."""
        self.cache.forget()

    def save(self) -> None:
        """Write some of what is remembered."""
        self.cache.save_some(self.draw.choice((1, 1, 2000, 10**9)))

    def lose(self) -> None:
        """Somebody deletes a file."""
        files = sorted(self.folder.rglob("*.safetensors"))
        if files:
            self.draw.choice(files).unlink()

    def empty(self, slot: int) -> None:
        """Clear a slot."""
        self.cache.clear(slot)
        self.content[slot] = []

    def extend(self, slot: int, prompt: list[int]) -> None:
        """Recall a prompt that begins like the slot: never tokens that nobody of the tenant computed."""
        if not self.content[slot]:
            self.salt[slot] = self.draw.choice(SALTS)
        standing, wanted = len(self.content[slot]), self.content[slot] + prompt[len(self.content[slot]) :]
        length = self.cache.recall(slot, wanted, salt=self.salt[slot])

        assert standing <= length <= len(wanted)
        assert length == standing or tuple(wanted[:length]) in self.remembered[self.salt[slot]]
        self.content[slot] = wanted[:length]

    def compute(self, slot: int, prompt: list[int]) -> None:
        """Append a prompt's tokens to those of the slot, if there is room."""
        wanted = self.content[slot] + prompt[len(self.content[slot]) :]
        rows = len(wanted) - len(self.content[slot])
        if rows and not self.cache.make_room([Span(slot, len(self.content[slot]), rows)]):
            feed(self.cache, slot, wanted, salt=self.salt[slot])
            self.content[slot] = wanted

    def hold(self, slot: int, length: int, *, seal: bool) -> None:
        """Remember the first tokens of a slot."""
        tokens = self.content[slot][:length]
        self.cache.remember(slot, tokens, salt=self.salt[slot], seal=seal)
        self.remembered[self.salt[slot]] |= {tuple(tokens[:some]) for some in range(length + 1)}

    def slots_hold_their_tokens(self) -> None:
        """A slot reads back what was computed for its tokens."""
        for slot, tokens in enumerate(self.content):
            check(self.cache, slot, tokens, salt=self.salt[slot])

    def nodes_hold_their_edges(self) -> None:
        """A node's content is that of its tokens; those that are not resident are on the shelf, wholly."""
        no_leak(self.cache)
        for salt, root in self.cache._tree._roots.items():
            assert root.children
            for node, before in walk(root, []):
                marks = digests([*before, *node.tokens.tolist()], salt)[node.start :]
                assert node.start == len(before)
                assert node.resident or node.shelved == len(node.tokens)
                assert node.warm == sum(child.resident for child in node.children.values())
                assert node.resident or not node.warm
                for group, held in zip(self.cache.groups, node.held, strict=False):
                    echo(group, held, marks)

    def the_shelf_adds_up(self) -> None:
        """Budgets are kept, what is counted is there, and every piece belongs to its edge."""
        here = self.cache._tree.shelf
        assert here.memory_bytes == sum(entry.memory_bytes for entry in here._memory) <= self.config.memory_bytes
        assert here.disk_bytes == sum(entry.file_bytes for entry in here._files) <= self.config.disk_bytes
        found = set()
        for root in self.cache._tree._roots.values():
            for node, _ in walk(root, []):
                at = 0
                for piece in node.pieces:
                    tokens = piece.entry.tokens[piece.start : piece.stop]
                    assert node.tokens[at : at + len(tokens)].tolist() == tokens.tolist()
                    assert node.start + at == piece.entry.start + piece.start
                    assert node in piece.entry.nodes
                    assert piece.entry in here._files or piece.entry in here._memory
                    found.add(piece.entry)
                    at += len(tokens)
        assert found == here._files | set(here._memory)

    def parents_were_used_later(self) -> None:
        """Of a node and its children, the children are the first to go."""
        order = {node: at for at, node in enumerate(self.cache._tree._resident)}
        for root in self.cache._tree._roots.values():
            for node, _ in walk(root, []):
                for child in node.children.values():
                    assert not child.resident or order[child] < order[node]

    def close(self) -> None:
        """Without slots and memories every cell is free again."""
        for slot in range(SLOTS):
            self.cache.clear(slot)
        self.cache.forget()
        for group in self.cache.groups:
            assert group.pool.cells == group.pool.free


def walk(node: Node, before: list[int]) -> list[tuple[Node, list[int]]]:
    """Every node below one, with the tokens before its edge."""
    found = []
    for child in node.children.values():
        found.append((child, before))
        found += walk(child, [*before, *child.tokens.tolist()])
    return found


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load and shelve a few tokens, in pieces of a few."""
    monkeypatch.setattr(prefix, "LEAST_LOADED", 2)
    monkeypatch.setattr(prefix, "LEAST_SHELVED", 3)
    monkeypatch.setattr(shelf, "PIECE_BYTES", 120)


@pytest.mark.parametrize("seed", range(24))
def test_any_order_of_operations_recalls_what_was_computed(seed: int, tmp_path: Path) -> None:
    """A hundred operations on a cache of any kind with a shelf of any kind."""
    done = History(tmp_path, random.Random(seed)).play(100)

    assert 100 == done.total()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_any_order_of_operations_recalls_what_was_computed_at_length(seed: int, tmp_path: Path) -> None:
    """Four hundred times two hundred and fifty."""
    History(tmp_path, random.Random(seed)).play(250)
