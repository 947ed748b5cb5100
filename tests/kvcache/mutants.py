"""Small mistakes in what slots, pools and forwards do: tests/kvcache/test_mutants.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mistake: in one file, `right` becomes `wrong`."""

    file: str
    right: str
    wrong: str


SLOTS = {
    "turns the wrong way": Mutant("rotary.py", "angles = by *", "angles = -by *"),
    "a column is read after it was written": Mutant(
        "rotary.py", "first.copy_(moved_x)", "first.copy_(moved_x).add_(0.01)"
    ),
    "interleaved as half": Mutant("rotary.py", 'if rotation.layout == "half":', "if True:"),
    "forgets the offset": Mutant("rotary.py", "begin, pairs = rotation.offset, len", "begin, pairs = 0, len"),
    "a drawn cell is not referenced": Mutant("cells.py", "self.references[more] = 1", "pass"),
    "a following cell is taken without asking": Mutant(
        "cells.py", "return int(taken[0]) if len(taken) else len(behind)", "return len(behind)"
    ),
    "the smallest runs are broken up": Mutant("cells.py", "np.argpartition(-lengths", "np.argpartition(lengths"),
    "runs are taken from the smallest on": Mutant("cells.py", "np.argsort(-lengths", "np.argsort(lengths"),
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
        "cache.py", "self._components.hold(source, 0, standing)", "self._components.hold(source, 0, standing + 1)"
    ),
    "what a target held stays": Mutant("cache.py", "self._components.truncate(target, 0)", "pass"),
    "a copy leaks": Mutant("cache.py", "self._components.release(held)", "pass"),
    "what is cut leaks": Mutant("attention.py", "self.pool.release(self._present(self.table(slot)[length:]))", "pass"),
    "each span is checked alone": Mutant(
        "attention.py", "needed = sum([span.length for span in spans])", "needed = max([span.length for span in spans])"
    ),
    "a shift writes into shared cells": Mutant(
        "attention.py", "private[shared] = self.pool.allocate(int(np.count_nonzero(shared)))", "pass"
    ),
    "a shift moves keys too far": Mutant(
        "attention.py", "self._turn(old, new, -drop)", "self._turn(old, new, -drop - 1)"
    ),
    "a shift does not turn": Mutant("attention.py", "self._turn(old, new, -drop)", "self._turn(old, new, 0)"),
    "values of private copies are forgotten": Mutant(
        "attention.py", "copy_cells(self.pool.values, sources[copied], targets[copied])", "pass"
    ),
    "originals of private copies leak": Mutant("attention.py", "self.pool.release(old[new != old])", "pass"),
    "the dropped cells leak": Mutant("attention.py", "self.pool.release(self._left_behind(slot, keep, drop))", "pass"),
    "a shift counts shared cells as freed": Mutant(
        "attention.py",
        "self._freed_by(self._left_behind(slot, keep, drop))",
        "len(self._left_behind(slot, keep, drop))",
    ),
    "a shift counts no freed cells": Mutant(
        "attention.py",
        "free = self.pool.free + self._freed_by(self._left",
        "free = self.pool.free + 0 * len(self._left",
    ),
    "a shift keeps what is out of reach": Mutant(
        "attention.py", "table[: self.spec.reach.oldest(len(table))]", "table[:0]"
    ),
    "a shift moves what is out of reach": Mutant(
        "attention.py", "return max(behind, self.spec.reach.oldest(self._lengths[slot]))", "return behind"
    ),
    "what is dropped within reach is counted twice": Mutant("attention.py", "table[max(keep, oldest) :", "table[keep:"),
    "a window moves if kept cells are one too near": Mutant(
        "attention.py", "length - drop) >= keep", "length - drop) >= keep - 1"
    ),
    "a window moves only if kept cells are farther": Mutant(
        "attention.py", "length - drop) >= keep", "length - drop) > keep"
    ),
    "a short window does not move": Mutant("attention.py", "(reach.oldest(length) == 0 or ", "("),
    "a window always moves": Mutant("attention.py", "(reach.oldest(length) == 0 or ", "(True or "),
    "a window sees one token more": Mutant("spec.py", "(position - self.size + 1) *", "(position - self.size) *"),
    "a window sees one token less": Mutant("spec.py", "(position - self.size + 1) *", "(position - self.size + 2) *"),
    "a chunk begins one late": Mutant(
        "spec.py", "position // self.size * self.size", "(position - 1) // self.size * self.size"
    ),
    "a reach as long as the capacity is a window": Mutant(
        "spec.py", "or self.size < length else", "or self.size <= length else"
    ),
    "a window before the last is full": Mutant(
        "spec.py", "or self.size < length else", "or self.size < length - 1 else"
    ),
    "a hole is overlooked": Mutant(
        "holes.py", "cells[max(reach.oldest(stop) - start, 0) :]", "cells[max(reach.oldest(stop) - start, 0) + 1 :]"
    ),
    "a hole where nobody looks matters": Mutant(
        "holes.py", "positions[last_hole < reach", "positions[last_hole + 1 < reach"
    ),
    "a hole at the edge does not matter": Mutant(
        "holes.py", "positions[last_hole < reach", "positions[last_hole <= reach"
    ),
    "rows release what they see": Mutant(
        "attention.py", "self._release_unseen(span.slot, span.start)", "self._release_unseen(span.slot, span.stop)"
    ),
    "rows release nothing": Mutant("attention.py", "self._release_unseen(span.slot, span.start)", "pass"),
    "what rows release does not count": Mutant(
        "attention.py", "free = self.pool.free + self._freed_by(unseen)", "free = self.pool.free"
    ),
    "what rows release counts though others have it": Mutant("attention.py", "self._freed_by(unseen)", "len(unseen)"),
    "what two slots release never counts": Mutant(
        "attention.py", "references[different] == owners", "references[different] == 1"
    ),
    "a cut slot believes that all was released": Mutant(
        "attention.py", "self._begins[slot] = min(length, self._begins[slot])", "pass"
    ),
    "released cells stay in the table": Mutant(
        "attention.py", "self._tables[slot, self._begins[slot] : oldest] = HOLE", "pass"
    ),
    "thinning takes what the end sees": Mutant(
        "attention.py", "oldest(start + len(held)) - start, 0)", "oldest(start + len(held)) - start + 1, 0)"
    ),
    "thinning leaves what nobody sees": Mutant(
        "attention.py", "oldest(start + len(held)) - start, 0)", "oldest(start + len(held)) - start - 1, 0)"
    ),
    "a thinned stretch still has its cells": Mutant(
        "attention.py", "np.concatenate((np.full(unseen, HOLE, dtype=np.int64), held[unseen:]))", "held"
    ),
    "a recall sees only its own part": Mutant("attention.py", "held[max(standing - begin, 0) :", "held[0:"),
    "a recall looks behind its end": Mutant("attention.py", ": max(length - begin, 0)] for", ":] for"),
    "a load begins anew": Mutant(
        "attention.py",
        "self.pool.load(cells, content, before, before + count)",
        "self.pool.load(cells, content, 0, count)",
    ),
    "a load fills holes": Mutant("attention.py", "held[present[start:stop]] = cells", "held[: len(cells)] = cells"),
    "a segment begins at the start": Mutant("attention.py", "self.table(slot)[first:]", "self.table(slot)"),
    "no room is made in slots": Mutant("cache.py", "component.shed()", "pass"),
    "a shared window counts as free": Mutant(
        "attention.py", "references[self._present(held)] == 1", "references[self._present(held)] >= 1"
    ),
    "a pool forgets the rows": Mutant(
        "spec.py", "(slots * (self.reach.size - 1) + rows)", "(slots * (self.reach.size - 1))"
    ),
    "a chunked layer is shifted": Mutant("spec.py", 'return self.kind != "chunk"', "return True"),
    "one layer that can move is enough": Mutant("spec.py", "self.reach.moves and all(", "self.reach.moves and any("),
    "the first group decides about shifts": Mutant(
        "cache.py", "not all(component.can_shift(slot", "not any(component.can_shift(slot"
    ),
    "a span may come twice": Mutant("cache.py", "span.slot in seen or ", ""),
    "a span may leave a gap": Mutant("cache.py", "span.start != standing", "span.start < standing"),
    "a span may exceed the capacity by one": Mutant(
        "cache.py", "span.stop > self.capacity", "span.stop > self.capacity + 1"
    ),
    "the first group alone is checked": Mutant(
        "cache.py", "            component.check_shift(slot, keep, drop)\n", "            break\n"
    ),
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
    "scattered cells pass for a run": Mutant(
        "cells.py", "return int(breaks[-1]) + 1 if len(breaks) else 0", "return 0"
    ),
    "a run goes on behind a break": Mutant("attention.py", "if run or not start:", "if not start:"),
    "segments begin anew": Mutant("forward.py", "row += span.length", "row = span.length"),
    "a recall begins anew": Mutant("prefix.py", "start, stop = max(standing - node.start, 0), ", "start, stop = 0, "),
    "a recall takes the whole edge": Mutant(
        "prefix.py", "min(goal - node.start, len(node.tokens))", "len(node.tokens)"
    ),
    "a split end keeps all cells": Mutant(
        "radix.py", "self._components.part(node.held, at, len(node.tokens))", "node.held"
    ),
    "a split beginning keeps all cells": Mutant("radix.py", "self._components.part(node.held, 0, at)", "node.held"),
    "a split end keeps its tokens": Mutant(
        "radix.py",
        "node.tokens, node.parent, node.start = node.tokens[at:], upper, node.start + at",
        "node.parent, node.start = upper, node.start + at",
    ),
    "a grown end forgets the new cells": Mutant(
        "prefix.py", "node.held = self._components.joined(node.held, held)", "pass"
    ),
    "a match ends one early": Mutant("radix.py", "int(same.argmin())", "max(int(same.argmin()) - 1, 0)"),
    "what is remembered is not referenced": Mutant(
        "attention.py", "self.pool.share(self._present(cells))\n        return cells", "return cells"
    ),
    "what is recalled is not referenced": Mutant("attention.py", "self.pool.share(self._present(held))", "pass"),
    "what is forgotten leaks": Mutant("attention.py", "self.pool.release(self._present(held))", "pass"),
}
