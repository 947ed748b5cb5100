"""The peers that are known by name: how each is started with the same threads, sequences and tokens as ours."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.options import Kind
from bench.target import BenchError

OPENVINO = str(Path(__file__).with_name("openvino_server.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What both sides get: threads, sequences at once, and tokens of each."""

    threads: int
    slots: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A server to measure beside ours.

    title      its name in tables
    program    what is run where --program names nothing else
    arguments  of a model and a share; {port} becomes a free port
    ready      where it answers 200 once it is ready
    kind       of prompts that it takes
    by_path    whether requests call the model by its path; else as /v1/models does
    """

    title: str
    program: str
    arguments: Callable[[str, Share], list[str]]
    ready: str
    kind: Kind
    by_path: bool = False

    def command(self, program: str | None, model: str, share: Share) -> list[str]:
        """Return the command line; Unusable where the program is not there."""
        beside = str(Path(sys.executable).with_name(self.program))
        found = shutil.which(program) if program else shutil.which(self.program) or shutil.which(beside)
        if found is None:
            raise BenchError(f"{program or self.program} is not there: give its path as --program")
        return [found, *self.arguments(model, share)]


def llama_cpp(model: str, share: Share) -> list[str]:
    """Return llama-server's arguments."""
    threads = ("-t", str(share.threads), "-tb", str(share.threads))
    cells = ("-np", str(share.slots), "-c", str(share.slots * share.context))
    return ["-m", model, "--port", "{port}", *threads, *cells, "-fa", "on"]


def openvino(model: str, share: Share) -> list[str]:
    """Return the arguments of the Python that has openvino-genai; -P keeps our files out of its imports."""
    return ["-P", OPENVINO, model, "--port", "{port}", "--threads", str(share.threads)]


def transformers(model: str, share: Share) -> list[str]:
    """Return the arguments of transformers' own server; its threads come by OMP_NUM_THREADS."""
    numbers = ("--device", "cpu", "--dtype", "float32", "--attn-implementation", "sdpa")
    return ["serve", "--continuous-batching", *numbers, "--port", "{port}", model]


PEERS = {
    "llama.cpp": Peer(title="llama.cpp", program="llama-server", arguments=llama_cpp, ready="/health", kind="ids"),
    "openvino": Peer(title="openvino-genai", program="python", arguments=openvino, ready="/v1/models", kind="ids"),
    "transformers": Peer(
        title="transformers serve",
        program="transformers",
        arguments=transformers,
        ready="/health",
        kind="text",
        by_path=True,
    ),
}
