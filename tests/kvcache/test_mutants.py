"""The tests judge the cache; the mutants judge the tests: each small mistake in the source must be noticed.

Every mutant is a copy of the package with one change, and a run of its tests in a process of its own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.kvcache.mutants import SLOTS, Mutant
from tests.kvcache.mutants_kept import KEPT

MUTANTS = {**SLOTS, **KEPT}
ROOT = Path(__file__).resolve().parents[2]
# The tests that judge, the quick ones first, and before them those that know most of a file.
JUDGES = (
    *("cells", "rotary", "hadamard", "planes", "spec", "encoder", "shift", "recurrent", "forward"),
    *("window", "prefix", "disk", "shelf", "shelf_order", "everything", "laws"),
)
OWN = {
    "attention": "window",
    "cache": "forward",
    "node": "shelf",
    "components": "recurrent",
    "holes": "window",
    "radix": "prefix",
}
# What pytest says where a test failed, and what a process says that took too long.
NOTICED = (1, -14)
# Imports what is slow to import, but nothing of ours, and plays each line's tests in a fork. Nobody will read what
# failed there, so no failing history is made small: that takes minutes.
NURSERY = """
import json, os, signal, sys
import hypothesis.stateful, numpy, pytest, safetensors.torch, torch
from hypothesis import Phase, settings
torch.set_num_threads(1)
settings.register_profile("as found", phases=[Phase.explicit, Phase.generate])
settings.load_profile("as found")
for line in sys.stdin:
    folder, files = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        sys.path.insert(0, folder)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        signal.alarm(120)
        import kvcache.cache
        if not kvcache.cache.__file__.startswith(folder):
            os._exit(99)
        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--assert=plain", *files]))
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def judges(mutant: Mutant | None) -> list[str]:
    """The files of tests for a mutant, in order."""
    own = Path(mutant.file).stem if mutant is not None else JUDGES[0]
    first = OWN.get(own, own)
    return [f"tests/kvcache/test_{name}.py" for name in sorted(JUDGES, key=lambda name: name != first)]


def prepare(mutant: Mutant | None, folder: Path) -> None:
    """A copy of the package and its tests, mutated if a mutant is given."""
    shutil.copytree(ROOT / "kvcache", folder / "kvcache", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").mkdir()
    (folder / "tests" / "__init__.py").touch()
    shutil.copytree(ROOT / "tests" / "kvcache", folder / "tests" / "kvcache")
    shutil.copy(ROOT / "pyproject.toml", folder)
    if mutant is not None:
        file = folder / "kvcache" / mutant.file
        text = file.read_text()
        assert 1 == text.count(mutant.right), f"{mutant.file} has {mutant.right!r} {text.count(mutant.right)} times"
        file.write_text(text.replace(mutant.right, mutant.wrong))


@contextmanager
def nursery() -> Iterator[subprocess.Popen[str]]:
    """A process that plays tests."""
    command = [sys.executable, "-c", NURSERY]
    with subprocess.Popen(command, cwd="/", text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.stdin.close()


def outcomes(mutants: dict[str, Mutant | None], root: Path, workers: int = 2) -> dict[str, int]:
    """What pytest's exit status is over each mutant's package."""
    waiting: SimpleQueue[str] = SimpleQueue()
    for name in mutants:
        waiting.put(name)
    found: dict[str, int] = {}

    def work() -> None:
        with nursery() as process:
            while not waiting.empty():
                name = waiting.get()
                folder = root / str(len(found)) / name.replace(" ", "_")
                prepare(mutants[name], folder)
                process.stdin.write(json.dumps([str(folder), judges(mutants[name])]) + "\n")
                process.stdin.flush()
                found[name] = int(process.stdout.readline())
                shutil.rmtree(folder)

    with ThreadPoolExecutor(workers) as pool:
        for worker in [pool.submit(work) for _ in range(workers)]:
            worker.result()
    return found


def test_every_mutant_is_a_change() -> None:
    """Each names a place that is there, once, so that none judges a source of the past."""
    sources = {mutant.file: (ROOT / "kvcache" / mutant.file).read_text() for mutant in MUTANTS.values()}

    assert [] == [name for name, mutant in MUTANTS.items() if sources[mutant.file].count(mutant.right) != 1]
    assert all(mutant.right != mutant.wrong for mutant in MUTANTS.values())


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_mutant_is_noticed(tmp_path: Path) -> None:
    """No mistake of the list passes the tests, and the package as it is does."""
    found = outcomes({"as it is": None, **MUTANTS}, tmp_path)

    assert 0 == found.pop("as it is")
    assert "" == ", ".join(name for name, status in found.items() if status not in NOTICED)
