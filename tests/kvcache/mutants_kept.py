"""Small mistakes in how content is stored, remembered and shelved: tests/kvcache/test_mutants.py."""

from __future__ import annotations

from tests.kvcache.mutants import Mutant

KEPT = {
    "codes are cut, not rounded": Mutant("planes.py", "(part / scale).round_()", "(part / scale).trunc_()"),
    "scales are one step too small": Mutant("planes.py", "/ 127).float()", "/ 128).float()"),
    "scales are not stored": Mutant("planes.py", "_put(self.scales[layer], cells, torch.cat(scales, -1))", "pass"),
    "keys are stored as they come": Mutant(
        "planes.py", "return torch.cat([transform(part) for part in torch.split(rows, parts, -1)], -1)", "return rows"
    ),
    "the first part's scale is all parts'": Mutant(
        "planes.py", "torch.split(scales, 1, -1), strict=True", "[scales[..., :1]] * scales.shape[-1], strict=True"
    ),
    "a copy leaves the scales behind": Mutant(
        "planes.py",
        "for tensor in plane.tensors.values():\n        tensor[",
        "for tensor in list(plane.tensors.values())[:1]:\n        tensor[",
    ),
    "a query of one part is cut like all": Mutant(
        "planes.py", "self.parts if rows.shape[-1] == self.width else self.parts[:1]", "self.parts"
    ),
    "differences are the other way round": Mutant("hadamard.py", "torch.sub(first, second", "torch.sub(second, first"),
    "the transform makes rows smaller": Mutant("hadamard.py", "columns.div(math.sqrt(block))", "columns.div(block)"),
    "the transform writes into its input": Mutant(
        "hadamard.py", ".clone(memory_format=torch.contiguous_format)", ".contiguous()"
    ),
    "every width is a power of two": Mutant("hadamard.py", "block, half = width & -width, 1", "block, half = width, 1"),
    "the first guess has no state before it": Mutant(
        "spec.py",
        "cuts = range(self.stop - self.guessed, self.stop + 1)",
        "cuts = range(self.stop - self.guessed + (self.guessed > 0), self.stop + 1)",
    ),
    "guesses have no states": Mutant(
        "spec.py", "cuts = range(self.stop - self.guessed, self.stop + 1)", "cuts = range(self.stop, self.stop + 1)"
    ),
    "all rows may be guesses": Mutant(
        "cache.py", "if not 0 <= span.guessed < span.length:", "if not 0 <= span.guessed <= span.length:"
    ),
    "thinning keeps every state": Mutant(
        "recurrent.py",
        "thin = Marks(held.length, {at: state for at, state in held.states.items() if at == held.length})",
        "thin = held",
    ),
    "thinning drops the last state": Mutant(
        "recurrent.py", "held.states.items() if at == held.length}", "held.states.items() if at == 0}"
    ),
    "thinning does not count": Mutant(
        "recurrent.py", "        self._held -= held.bytes\n        thin =", "        thin ="
    ),
    "states never thin": Mutant("recurrent.py", "return any(at < held.length for at in held.states)", "return False"),
    "a part has the state before it": Mutant(
        "recurrent.py",
        "in held.states.items() if start < at <= stop}",
        "in held.states.items() if start <= at <= stop}",
    ),
    "a part's states stay where they were": Mutant(
        "recurrent.py",
        "return Marks(stop - start, {at - start: state for at, state in held",
        "return Marks(stop - start, {at: state for at, state in held",
    ),
    "joined states stay where they were": Mutant("recurrent.py", "first.length + at: state", "at: state"),
    "a load takes the states before it": Mutant("recurrent.py", "if start < int(at) <= stop:", "if int(at) <= stop:"),
    "a load's states stay where they were": Mutant(
        "recurrent.py", "states.setdefault(int(at) - start, {})", "states.setdefault(int(at), {})"
    ),
    "loaded states count for nothing": Mutant(
        "recurrent.py",
        "marks = Marks(stop - start, states)\n        self._held += marks.bytes",
        "marks = Marks(stop - start, states)",
    ),
    "released states still count": Mutant(
        "recurrent.py", '"""Let go of the states."""\n        self._held -= held.bytes', '"""Let go of the states."""'
    ),
    "a shift leaves states of another past": Mutant("recurrent.py", "if position <= keep}", "if True}"),
    "an emptied slot has a state": Mutant(
        "recurrent.py",
        "states | {length: row.states[row.length]} | {0: {}}",
        "states | {0: {}} | {length: row.states[row.length]}",
    ),
    "a name is a list": Mutant("recurrent.py", "state[_hashable(json.loads(name))]", "state[json.loads(name)]"),
    "a saved state is the state itself": Mutant("recurrent.py", 'tensor.to("cpu", copy=True)', 'tensor.to("cpu")'),
    "a restored state is no mark": Mutant(
        "recurrent.py", "            row.marks.append(row.length + at)\n        row", "        row"
    ),
    "each component lowers the goal once": Mutant("components.py", "while goal != before:", "while before < 0:"),
    "each component lowers a length once": Mutant("components.py", "while length != before:", "while before < 0:"),
    "what one component needs, all must have": Mutant(
        "components.py",
        "return any(count > 0 and component.freeable(part) > 0",
        "return all(count > 0 and component.freeable(part) > 0",
    ),
    "no cells are ever lacking": Mutant("components.py", "return error.needed - error.free", "return 0"),
    "a lower piece begins anew": Mutant(
        "node.py",
        "lower.append(Piece(piece.entry, piece.start + middle, piece.stop))",
        "lower.append(Piece(piece.entry, piece.start, piece.stop))",
    ),
    "pieces are all cut at the same place": Mutant("node.py", "begin += piece.stop - piece.start", "begin += 0"),
    "a gap in the files is overlooked": Mutant(
        "node.py",
        "return self.pieces[: next(missing, len(self.pieces))]",
        "return [piece for at, piece in enumerate(self.pieces) if at not in set(missing)]",
    ),
    "an entry keeps nodes that left it": Mutant("node.py", "piece.entry.nodes.discard(self)", "pass"),
    "tenants meet": Mutant(
        "radix.py",
        "node, depth = self.roots.get(salt), 0",
        'node, depth = self.roots.get(salt, self.roots.get(b"")), 0',
    ),
    "sealed ends grow": Mutant("radix.py", " and not above.sealed", ""),
    "nothing is sealed": Mutant("prefix.py", "path[-1].sealed = True", "pass"),
    "what was wanted last is thinned first": Mutant(
        "prefix.py", "thick.popitem(last=False)", "thick.popitem(last=True)"
    ),
    "what was wanted last goes first": Mutant(
        "prefix.py", "leaf = next(iter(self._radix.resident))", "leaf = next(reversed(self._radix.resident))"
    ),
    "beginnings are wanted less": Mutant(
        "radix.py",
        "for node in reversed(path):\n            self.shelf.touch(node)",
        "for node in path:\n            self.shelf.touch(node)",
    ),
    "what is promoted makes room in its own path": Mutant(
        "prefix.py", "        for node in path[:first]:\n            del self._radix.resident[node]\n", ""
    ),
    "gaps stay": Mutant("prefix.py", "self._heal(slot, path, depth)", "pass"),
    "a healed gap stays on the shelf": Mutant(
        "prefix.py",
        "            self.shelf.link(node, [])\n            self._radix.enter(node)",
        "            self._radix.enter(node)",
    ),
    "a shelved end is not taken from the slot": Mutant(
        "prefix.py", "if not node.resident and node.stop <= depth:", "if not node.resident and node.stop < depth:"
    ),
    "twins are kept": Mutant("prefix.py", "if not node.warm and self._components.idles(node.held, need)", "if False"),
    "what is evicted is not shelved": Mutant("prefix.py", "            self.shelf.put(node)\n", "            pass\n"),
    "the shelf is cut while content comes": Mutant(
        "prefix.py",
        "        self._make_room(self._components.lacking(content, piece.start, piece.stop))\n",
        "        self._make_room(self._components.lacking(content, piece.start, piece.stop))\n"
        "        self.shelf.fit()\n",
    ),
    "pruned nodes count": Mutant("radix.py", "            self.nodes -= 1\n", "            pass\n"),
    "children stay warm": Mutant("radix.py", "node.parent.warm -= 1", "pass"),
    "a lost piece leaves its node": Mutant(
        "radix.py", "            if not node.resident:\n                self.prune(node)", "            pass"
    ),
    "every cut survives the process": Mutant("prefix.py", "node.sealed = file.stretch.ends", "node.sealed = True"),
    "no end survives the process": Mutant("prefix.py", "node.sealed = file.stretch.ends", "node.sealed = False"),
    "a file without its beginning is taken in": Mutant(
        "prefix.py", "if not start <= depth < len(tokens):", "if not depth < len(tokens):"
    ),
    "after a start files are as old as their names": Mutant(
        "prefix.py", "for _, entry in sorted(found, key=lambda pair: pair[0].used):", "for _, entry in found:"
    ),
    "few tokens are loaded": Mutant(
        "prefix.py", "if depth - max(standing, path[first].start) < MIN_LOAD_TOKENS:", "if False:"
    ),
    "what helps nobody is loaded": Mutant("prefix.py", "depth = self._promised(path, standing, depth)", "pass"),
    "what lies on the shelf has no holes": Mutant("attention.py", ".numpy(), 0, HOLE)", ".numpy(), 0, 0)"),
    "what lies on the shelf has no states": Mutant("recurrent.py", "for at in {int(key", "for at in {-1 * int(key"),
    "files are looked into again and again": Mutant(
        "shelf.py", "entry.outline = self._components.outline(content, len(entry.tokens))", "pass"
    ),
    "nothing waits to be written": Mutant("shelf.py", "max(config.memory_bytes, waiting)", "config.memory_bytes"),
    "what is written waits on": Mutant(
        "shelf.py", "            self._empty(entry)\n        for each", "            pass\n        for each"
    ),
    "what waits has no end": Mutant("shelf.py", "min(WRITE_BUFFER_BYTES, config.disk_bytes)", "config.disk_bytes"),
    "the shelf's memory has no end": Mutant(
        "shelf.py", "while self.memory_bytes > self.memory_budget:", "while False:"
    ),
    "what was shelved last goes first": Mutant(
        "shelf.py", "self._empty(next(iter(self._memory)))", "self._empty(next(reversed(self._memory)))"
    ),
    "files outgrow their budget": Mutant("shelf.py", "if self.disk_bytes > self._config.disk_bytes:", "if False:"),
    "entries that nobody needs stay": Mutant("shelf.py", "if not entry.nodes:", "if False:"),
    "beginnings leave the shelf first": Mutant(
        "shelf.py",
        "        for piece in reversed(node.pieces):\n            if piece.entry.content is not None:",
        "        for piece in node.pieces:\n            if piece.entry.content is not None:",
    ),
    "a text that is too large is all shelved": Mutant(
        "shelf.py", "if (room := room - entry.memory_bytes) < 0:", "if False:"
    ),
    "a full disk is tried again and again": Mutant(
        "shelf.py", "self._full = self._clock\n            return 0", "return 0"
    ),
    "what is wanted more makes room": Mutant("shelf.py", "if entry.used < used", "if True"),
    "ends are no ends": Mutant("shelf.py", "ends = any(", "ends = not any("),
    "beginnings of files are deleted first": Mutant(
        "shelf.py", "(entry.used, -entry.start)", "(entry.used, entry.start)"
    ),
    "files are found in any order": Mutant(
        "shelf.py",
        "for found in sorted(every, key=lambda found: (found.stretch.start, len(found.stretch.tokens))):",
        "for found in every:",
    ),
    "ends are written before their beginnings": Mutant(
        "shelf.py", "return next(node for node in wanted.path() if node in self._unwritten)", "return wanted"
    ),
    "a file's size does not count": Mutant("shelf.py", "self.disk_bytes += entry.file_bytes", "pass"),
    "a piece is written from the begin of its edge": Mutant(
        "shelf.py", "begin = sum(piece.stop - piece.start for piece in filed)", "begin = 0"
    ),
    "a deleted file is not written again": Mutant(
        "shelf.py", "            for node in tuple(entry.nodes):\n                self.note(node)", "            pass"
    ),
    "a wanted piece is not wanted": Mutant(
        "shelf.py",
        "                self._memory.move_to_end(piece.entry)\n            if",
        "                pass\n            if",
    ),
    "a changed file is read": Mutant("disk.py", "if hashlib.sha256(data).hexdigest() + _SUFFIX != name:", "if False:"),
    "another model's file is ours": Mutant("disk.py", ' or about["identity"] != identity', ""),
    "another version's file is ours": Mutant("disk.py", 'about["format"] != FORMAT or ', ""),
    "salts are not written": Mutant("disk.py", '"salt": stretch.salt.hex()', '"salt": ""'),
    "a failed disk is tried at once": Mutant("disk.py", "self._resumes = time.monotonic() + self._pause", "pass"),
    "pauses stay short": Mutant("disk.py", "min(2 * self._pause", "min(self._pause"),
    "files are for everybody": Mutant("disk.py", "os.O_TRUNC, 0o600", "os.O_TRUNC, 0o644"),
    "links are followed": Mutant("disk.py", " | os.O_NOFOLLOW", ""),
    "other models' newest files go first": Mutant("disk.py", "reverse=True", "reverse=False"),
    "a file without tokens is taken in": Mutant("disk.py", "if not 0 <= stretch.start < len(tokens):", "if False:"),
    "a failed write leaves its file": Mutant("disk.py", "temporary.unlink(missing_ok=True)", "pass"),
    "components share a file's names": Mutant("disk.py", 'f"{at}/{name}"', 'f"0/{name}"'),
    "what was encoded last goes first": Mutant(
        "encoder.py",
        "for digest in [digest for digest in self._entries if",
        "for digest in [digest for digest in reversed(self._entries) if",
    ),
    "what is pinned goes": Mutant("encoder.py", " if digest not in self._pins]", "]"),
}
