"""The laws judge the cache; the mutants judge the laws: each small mistake in the source must be noticed.

Every mutant is a copy of the package with one change, and a run of the laws in a process of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Enough that every mutant is found, few enough that a survivor takes a minute only.
HISTORIES = """
import kvcache.cache, sys
assert kvcache.cache.__file__.startswith(sys.argv[1]), kvcache.cache.__file__
from tests.kvcache import test_shift
from tests.kvcache.test_laws import run
for name in dir(test_shift):
    if name.startswith("test_"):
        getattr(test_shift, name)()
run(250, 60, derandomize=True, shrink=False)
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mistake: in one file, `right` becomes `wrong`."""

    file: str
    right: str
    wrong: str


MUTANTS = {
    "turns the wrong way": Mutant("rotary.py", "angles = by *", "angles = -by *"),
    "a column is read after it was written": Mutant(
        "rotary.py", "first.copy_(moved_x)", "first.copy_(moved_x).add_(0.01)"
    ),
    "interleaved as half": Mutant("rotary.py", 'if rotation.layout == "half":', "if True:"),
    "forgets the offset": Mutant("rotary.py", "begin = rotation.offset", "begin = 0"),
    "a drawn cell is not referenced": Mutant("cells.py", "self.references[more] = 1", "pass"),
    "a following cell is taken without asking": Mutant(
        "cells.py", "run = len(window) if window.all() else int(window.argmin())", "run = len(window)"
    ),
    "free is not counted down": Mutant("cells.py", "self.free -= count", "self.free -= max(count - 1, 0)"),
    "a shared cell counts as free": Mutant(
        "cells.py", "self.references[cells] == 0))", "self.references[cells] <= 1))"
    ),
    "sharing costs nothing": Mutant("cells.py", "self.references[cells] += 1", "pass"),
    "too much is refused": Mutant("cells.py", "if count > self.free:", "if count >= self.free:"),
    "three owners, not two, are sharing": Mutant(
        "cells.py", "return self.references[cells] > 1", "return self.references[cells] > 2"
    ),
    "a copy is one too long": Mutant(
        "attention.py", "cells = self.table(source)[:length].copy()", "cells = self.table(source)[: length + 1].copy()"
    ),
    "what a target held leaks": Mutant("attention.py", "self.pool.release(self.table(target))", "pass"),
    "what is cut leaks": Mutant("attention.py", "self.pool.release(self.table(slot)[length:])", "pass"),
    "each span is checked alone": Mutant(
        "attention.py", "needed = sum(span.length for span in spans)", "needed = max(span.length for span in spans)"
    ),
    "a shift writes into shared cells": Mutant(
        "attention.py", "private[shared] = self.pool.allocate(int(np.count_nonzero(shared)))", "pass"
    ),
    "a shift moves keys too far": Mutant(
        "attention.py", "self._turn(old, new, -drop)", "self._turn(old, new, -drop - 1)"
    ),
    "a shift does not turn": Mutant("attention.py", "self._turn(old, new, -drop)", "self._turn(old, new, 0)"),
    "values of private copies are forgotten": Mutant(
        "attention.py", "values[:, targets[copied]] = values[:, sources[copied]]", "pass"
    ),
    "originals of private copies leak": Mutant("attention.py", "self.pool.release(old[new != old])", "pass"),
    "the dropped cells leak": Mutant("attention.py", "self.pool.release(table[keep : keep + drop])", "pass"),
    "a shift counts shared cells as freed": Mutant(
        "attention.py", "int(np.count_nonzero(~self.pool.shared(dropped)))", "len(dropped)"
    ),
    "a shift counts no freed cells": Mutant(
        "attention.py", "free = self.pool.free + int", "free = self.pool.free + 0 * int"
    ),
    "a chunked layer is shifted": Mutant("spec.py", 'return self.kind != "chunk"', "return True"),
    "one layer that can move is enough": Mutant("spec.py", "self.reach.moves and all(", "self.reach.moves and any("),
    "the first group decides about shifts": Mutant(
        "cache.py", "if not all(component.can_shift(slot)", "if not any(component.can_shift(slot)"
    ),
    "a span may come twice": Mutant("cache.py", "span.slot in seen or ", ""),
    "a span may leave a gap": Mutant("cache.py", "span.start != standing", "span.start < standing"),
    "a span may exceed the capacity by one": Mutant(
        "cache.py", "span.stop > self.capacity", "span.stop > self.capacity + 1"
    ),
    "an empty span is fine": Mutant("cache.py", "span.length < 1 or ", ""),
    "the first group alone is checked": Mutant("cache.py", "component.check_shift(slot, keep, drop)", "break"),
    "an open forward may be disturbed": Mutant("cache.py", 'raise CacheError("a forward is open")', "pass"),
    "a failed forward keeps its rows": Mutant(
        "forward.py", "self._kept if kind is None else", "self._kept if True else"
    ),
    "a failed forward keeps what was asked for": Mutant(
        "forward.py",
        "{span.slot: span.start for span in self.spans}",
        "{span.slot: span.start + 1 for span in self.spans}",
    ),
    "nothing is kept unless asked for": Mutant(
        "forward.py", "self._kept = {span.slot: span.stop", "self._kept = {span.slot: span.start"
    ),
    "rows go to the first cells": Mutant(
        "forward.py", "group.table(span.slot)[span.start :] for span", "group.table(span.slot)[: span.length] for span"
    ),
    "scattered cells pass for a run": Mutant("forward.py", "and bool((np.diff(cells) == 1).all())", ""),
    "segments begin anew": Mutant("forward.py", "row += span.length", "row = span.length"),
    "a recall begins anew": Mutant("prefix.py", "start, stop = max(standing - begin, 0), ", "start, stop = 0, "),
    "a recall takes the whole edge": Mutant("prefix.py", "min(goal - begin, len(node.tokens))", "len(node.tokens)"),
    "a split end keeps all cells": Mutant("prefix.py", "node.held = self._parts(node, at, len(node.tokens))", "pass"),
    "a split end keeps its tokens": Mutant(
        "prefix.py", "node.tokens, node.parent = node.tokens[at:], upper", "node.parent = upper"
    ),
    "a shortened end gives back what it keeps": Mutant(
        "prefix.py",
        "tail = self._parts(leaf, max(keep, 0), len(leaf.tokens))",
        "tail = self._parts(leaf, 0, len(leaf.tokens))",
    ),
    "a grown end forgets the new cells": Mutant("prefix.py", "component.joined(old, new) for", "old for"),
    "a match ends one early": Mutant("prefix.py", "int(same.argmin())", "max(int(same.argmin()) - 1, 0)"),
    "what is remembered is not referenced": Mutant(
        "attention.py", "self.pool.share(cells)\n        return cells", "return cells"
    ),
    "what is recalled is not referenced": Mutant("attention.py", "self.pool.share(held)", "pass"),
    "what is forgotten leaks": Mutant("attention.py", "self.pool.release(held)", "pass"),
}


def outcome(mutant: Mutant | None, folder: Path) -> int:
    """The exit status of the law machine over a copy of the package, mutated if a mutant is given."""
    shutil.copytree(ROOT / "kvcache", folder / "kvcache", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").mkdir()
    (folder / "tests" / "__init__.py").touch()
    shutil.copytree(ROOT / "tests" / "kvcache", folder / "tests" / "kvcache")
    if mutant is not None:
        file = folder / "kvcache" / mutant.file
        text = file.read_text()
        assert 1 == text.count(mutant.right), f"{mutant.file} has {mutant.right!r} {text.count(mutant.right)} times"
        file.write_text(text.replace(mutant.right, mutant.wrong))
    command = [sys.executable, "-c", HISTORIES, str(folder)]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, timeout=240, check=False).returncode
    except subprocess.TimeoutExpired:
        return -1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_mutant_is_noticed(tmp_path: Path) -> None:
    """No mistake of the list passes the laws, and the package as it is does."""
    with ThreadPoolExecutor(2) as pool:
        outcomes = pool.map(lambda name: outcome(MUTANTS[name], tmp_path / name), MUTANTS)

    survivors = [name for name, status in zip(MUTANTS, outcomes, strict=True) if status == 0]
    assert 0 == outcome(None, tmp_path / "as it is")
    assert "" == ", ".join(survivors)
