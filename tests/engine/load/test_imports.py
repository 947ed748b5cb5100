"""Imports of transformers without the compiler and the distributed tensors of torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
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

DEFER = """
import sys
from engine.load.meta_kernels import import_meta_kernels, import_torch
import_torch()
import torch
left_out = "torch._refs.linalg" not in sys.modules
print(torch.randn(2, generator=torch.Generator().manual_seed(0)).tolist())
{first_use}
import_meta_kernels()
print(torch.broadcast_shapes((1, 2), (3, 1)), torch.empty(3, 4, device="meta").cummin(0)[0].shape)
print(len(torch._C._dispatch_get_registrations_for_dispatch_key("Meta")))
print(torch.randn(2, generator=torch.Generator().manual_seed(0)).tolist())
print(left_out)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "first_use",
    ["import_meta_kernels()", "from torch._decomp import decomposition_table", "torch.broadcast_shapes((2,))"],
)
def test_kernels_of_the_meta_device_are_imported_at_their_first_use(first_use: str) -> None:
    """As many as by a plain import of torch; random numbers are the same before and after."""
    deferred, plain = (run(before + DEFER.format(first_use=first_use)) for before in ("", "import torch"))

    assert plain[:-1] == deferred[:-1]
    assert ("False", "True") == (plain[-1], deferred[-1])


@pytest.mark.slow
def test_model_generates_without_the_compiler() -> None:
    """The tokens are the same as with a plain import; neither the compiler nor distributed tensors are loaded."""
    lean, plain = run(GENERATE), run(GENERATE.replace("import_transformers()", "", 1))

    assert plain[0] == lean[0]
    assert "[]" == lean[1]
    assert plain[2] == lean[2]


@pytest.mark.slow
def test_compiler_is_imported_at_its_first_use() -> None:
    """A graph is captured, and the decorators are the compiler's own."""
    assert ["[2.0, 2.0]", "1", "False"] == run(COMPILE)


def test_model_classes_equal_the_scan_of_transformers() -> None:
    """Modules, classes and requirements."""
    folder = Path(transformers.__file__).parent / "models"

    assert define_import_structure(str(folder / "__init__.py")) == model_classes()


def run(code: str) -> list[str]:
    """The lines that a new process prints."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
