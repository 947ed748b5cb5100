"""The server imports transformers without the compiler and the distributed tensors of torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import transformers
from transformers.utils.import_utils import define_import_structure

from engine.load.imports import model_classes

ROOT = Path(__file__).parents[3]

GENERATE = """
import sys
from engine.load.imports import import_transformers
import_transformers()
from transformers import LlamaConfig, LlamaForCausalLM
import torch
import engine.engine
torch.manual_seed(0)
size = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**size, num_key_value_heads=1, eos_token_id=None, bos_token_id=None)).eval()
print(model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=8, do_sample=False).tolist())
print(sorted({"sympy", "torch._inductor", "torch.distributed.tensor"} & sys.modules.keys()))
print(torch.distributed.is_available())
"""

COMPILE = """
from engine.load.imports import import_transformers
import_transformers()
import torch
graphs = []
def keep(graph, inputs):
    graphs.append(graph)
    return graph.forward
def increment(value):
    return value + 1
print(torch.compile(increment, backend=keep)(torch.ones(2)).tolist())
print(len(graphs))
print(torch.compiler.disable(increment) is increment)
"""


def test_a_model_runs_without_the_compiler() -> None:
    """Tokens are those of a plain import, and neither the compiler nor distributed tensors are in memory."""
    lean, plain = run(GENERATE), run(GENERATE.replace("import_transformers()", "", 1))

    assert plain[0] == lean[0]
    assert "[]" == lean[1]
    assert plain[2] == lean[2]


def test_the_compiler_is_imported_where_it_is_used() -> None:
    """A graph is captured, and a decorator is the compiler's own by then."""
    assert ["[2.0, 2.0]", "1", "False"] == run(COMPILE)


def test_the_classes_of_models_are_those_that_transformers_finds() -> None:
    """Modules, classes and what they require."""
    folder = Path(transformers.__file__).parent / "models"

    assert define_import_structure(str(folder / "__init__.py")) == model_classes()


def run(code: str) -> list[str]:
    """The lines that a new process prints."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
