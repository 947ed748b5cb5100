"""Commands that start a peer with the same threads, sequences and context as Cellar."""

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
class Resources:
    """Resources of each server: threads, slots, and tokens of a slot."""

    threads: int
    slots: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A server to measure beside ours.

    title      its name in tables
    program    default of --program
    arguments  for a model and its resources; {port} is replaced by a free port
    ready      path that answers 200 when the server is ready
    kind       of prompts: token ids or text
    by_path    whether requests name the model by its path instead of the name in /v1/models
    """

    title: str
    program: str
    arguments: Callable[[str, Resources], list[str]]
    ready: str
    kind: Kind
    by_path: bool = False

    def command(self, program: str | None, model: str, resources: Resources) -> list[str]:
        """Return the command line; BenchError if the program is not installed."""
        beside = str(Path(sys.executable).with_name(self.program))
        found = shutil.which(program) if program else shutil.which(self.program) or shutil.which(beside)
        if found is None:
            raise BenchError(f"{program or self.program} is not installed: give its path as --program")
        return [found, *self.arguments(model, resources)]


def llama_cpp(model: str, resources: Resources) -> list[str]:
    """Return llama-server's arguments."""
    threads = ("-t", str(resources.threads), "-tb", str(resources.threads))
    cells = ("-np", str(resources.slots), "-c", str(resources.slots * resources.context))
    return ["-m", model, "--port", "{port}", *threads, *cells, "-fa", "on"]


def ik_llama_cpp(model: str, resources: Resources) -> list[str]:
    """Return the arguments of ik_llama.cpp's llama-server: repacked weights, and its attention for latent caches."""
    cells = ("-np", str(resources.slots), "-c", str(resources.slots * resources.context))
    threads = ("-t", str(resources.threads), "-tb", str(resources.threads))
    return ["-m", model, "--port", "{port}", *threads, *cells, "-fa", "on", "-rtr", "-mla", "3"]


def openvino(model: str, resources: Resources) -> list[str]:
    """Return the arguments of a Python with openvino-genai; -P keeps this checkout out of its imports."""
    return ["-P", OPENVINO, model, "--port", "{port}", "--threads", str(resources.threads)]


def transformers(model: str, resources: Resources) -> list[str]:
    """Return the arguments of `transformers serve`; OMP_NUM_THREADS sets its threads."""
    numbers = ("--device", "cpu", "--dtype", "float32", "--attn-implementation", "sdpa")
    return ["serve", "--continuous-batching", *numbers, "--port", "{port}", model]


PEERS = {
    "llama.cpp": Peer(title="llama.cpp", program="llama-server", arguments=llama_cpp, ready="/health", kind="ids"),
    "ik_llama.cpp": Peer(
        title="ik_llama.cpp", program="llama-server", arguments=ik_llama_cpp, ready="/health", kind="ids"
    ),
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
