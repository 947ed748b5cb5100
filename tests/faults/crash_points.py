"""Every call that changes a file of a store, once as the moment of a crash and once failing, for all kinds of stores.

`python -m tests.faults.crash_points [SCENARIO ...]` prints a table. A library (file_faults.c) that is loaded before
libc counts the calls below the folder of a store, so it sees those of SQLite and safetensors as well. For k = 1, 2, ...
a new process takes the steps of a scenario until its k-th call, at which it dies or gets an error; after a crash
another process opens the same folder. It must find the state after all acknowledged steps, or after the next one too,
and take the other steps. The run ends when a process takes all steps with fewer than k calls.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

SOURCE = Path(__file__).with_name("file_faults.c")
LIBRARY = "CELLAR_FILE_FAULTS"
ROOT = Path(__file__).resolve().parents[2]
MAX_CALLS = 5000
# What happens at the chosen call: file_faults.c has the negative ones.
FAULTS = {
    "kill": -1,
    "torn write": -2,
    "power cut": -3,
    "no space": errno.ENOSPC,
    "input or output error": errno.EIO,
    "read-only": errno.EROFS,
    "too many open files": errno.EMFILE,
}
# These stay until the step is over.
LASTING = ("no space", "read-only", "too many open files")


class Store(Protocol):
    """An open store and the steps of its scenario."""

    def take(self, step: int) -> None:
        """Take a step; returning acknowledges it. Raises one of the scenario's errors."""

    def state(self) -> object:
        """What a reader finds."""

    def close(self) -> None:
        """Close the store."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The steps on one kind of store.

    states       the states before the first step and after each
    errors       a failed step raises one of them
    best_effort  a step may return without effect: a cache that logs the error
    """

    open: Callable[[Path], Store]
    states: tuple[object, ...]
    errors: tuple[type[Exception], ...] = (OSError,)
    best_effort: bool = False


@dataclass(frozen=True, slots=True)
class Count:
    """The calls at which a fault occurred, and the first failures."""

    scenario: str
    fault: str
    points: int
    failures: list[str]


def build(folder: Path) -> Path:
    """The compiled library."""
    library = folder / "file_faults.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(library), "-ldl"], check=True)
    return library


def run(names: list[str], faults: list[str] | None = None) -> list[Count]:
    """The counts of scenarios and faults (default: all), in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        library = str(build(Path(folder)))
        environment = {**os.environ, "LD_PRELOAD": library, LIBRARY: library, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.faults.crash_points", "--json", json.dumps([names, faults])]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [Count(**count) for count in json.loads(done.stdout)]


def measure(name: str, scenario: Scenario, fault: str) -> Count:
    """All points of one fault. Forks: the process may have one thread only."""
    failures: list[str] = []
    for call in range(1, MAX_CALLS):
        with tempfile.TemporaryDirectory() as outer:
            folder = Path(outer, "store")
            folder.mkdir()
            report = Path(outer, "report")
            status = _in_child(lambda: _take_steps(scenario, folder, report, fault, call))  # noqa: B023
            acknowledged, reached = json.loads(report.read_text() or "[0, 0]")
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                reached = call
                status = _in_child(lambda: _recover(scenario, folder, acknowledged))  # noqa: B023
            if status:
                failures.append(f"call {call} after {acknowledged} steps: {_left(folder)}")
            if reached < call:
                return Count(name, fault, call - 1, failures[:5])
    raise AssertionError(f"{name} has more than {MAX_CALLS} calls")


def _take_steps(scenario: Scenario, folder: Path, report: Path, fault: str, call: int) -> None:
    """Take all steps with a fault at a call. Writes the number of acknowledged steps and of calls to the report."""
    library = _library()
    descriptor = os.open(report, os.O_WRONLY | os.O_CREAT)

    def write(acknowledged: int, calls: int) -> None:
        os.pwrite(descriptor, f"[{acknowledged:4}, {calls:6}]".encode(), 0)

    write(0, 0)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    library.file_faults_arm(str(folder).encode(), call, FAULTS[fault], fault in LASTING)
    store: Store | None = None
    calls, over, step = 0, False, 0
    while step < len(scenario.states) - 1 or store is None:
        failed = False
        try:
            if store is None:
                store = scenario.open(folder)
            if step < len(scenario.states) - 1:
                store.take(step)
        except scenario.errors:
            failed = True
        if not over and (failed or library.file_faults_calls() >= call):
            # The fault is over: the store works again, and the step did nothing, or all.
            calls, over = library.file_faults_disarm(), True
            assert not failed or calls >= call, "failed without a fault"
            store = store or scenario.open(folder)
            state = store.state()
            allowed = scenario.states[step : step + 2]
            assert state in (allowed if failed or scenario.best_effort else allowed[-1:]), (state, allowed)
            if state == scenario.states[step] and step < len(scenario.states) - 1:
                store.take(step)
                assert store.state() == scenario.states[step + 1], (store.state(), scenario.states[step + 1])
        else:
            assert not failed, "fails after the fault"
        step = min(step + 1, len(scenario.states) - 1)
        write(step, 0)
    assert store.state() == scenario.states[-1], (store.state(), scenario.states[-1])
    store.close()
    write(step, calls if over else library.file_faults_disarm())


def _recover(scenario: Scenario, folder: Path, acknowledged: int) -> None:
    """Open the store after a crash, compare its state, and take the other steps."""
    os.environ["XDG_CACHE_HOME"] = str(folder)
    store = scenario.open(folder)
    state, allowed = store.state(), scenario.states[acknowledged : acknowledged + 2]
    assert state in allowed, (state, allowed)
    for step in range(acknowledged + (state != allowed[0]), len(scenario.states) - 1):
        store.take(step)
    assert store.state() == scenario.states[-1], (store.state(), scenario.states[-1])
    store.close()
    # The first step removed what the crash left.
    assert acknowledged or state == allowed[1] or not list(folder.rglob(".writing-*"))


def _in_child(work: Callable[[], None]) -> int:
    """The status of a forked process that does the work: 0, its signal, or an exit status after an exception."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def _left(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ[LIBRARY])
    library.file_faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    library.file_faults_disarm.restype = library.file_faults_calls.restype = ctypes.c_long
    return library


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["--json"]:
        from tests.faults.scenarios import SCENARIOS

        names, faults = json.loads(arguments[1])
        chosen = {name: SCENARIOS[name] for name in names or SCENARIOS}
        counts = [
            measure(name, scenario, fault)
            for name, scenario in chosen.items()
            for fault in FAULTS
            if faults is None or fault in faults
        ]
        print(json.dumps([asdict(count) for count in counts]))
        return 0
    counts = run(arguments)
    for count in counts:
        print(f"{count.scenario:20} {count.fault:22} {count.points:5} points, failed: {len(count.failures)}")
        print("".join(f"    {failure}\n" for failure in count.failures), end="")
    print(f"{sum(count.points for count in counts)} points")
    return int(any(count.failures for count in counts))


if __name__ == "__main__":
    if not shutil.which("cc"):
        raise SystemExit("needs a C compiler")
    raise SystemExit(_main(sys.argv[1:]))
