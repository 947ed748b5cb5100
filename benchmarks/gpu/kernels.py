"""Compiles the Triton kernels for GPUs that need not be there, and lists registers, spills and shared memory.

    python -m benchmarks.gpu.kernels [--target sm_80 --target sm_90 --target gfx942] [--only WORDS] [--json FILE]

Needs triton (`pip install --no-deps triton==3.7.1` beside torch for CPUs), no GPU and no CUDA toolkit. Kernels are
compiled as engine/kernels/triton/launch.py launches them: with its constants, and the alignment of its pointers.
Spilled bytes are those of a thread, shared bytes those of a program: every GPU of sm_80 and later has 99 KiB.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.result import add_json_option, command_parser, measured
from engine.kernels.formats import WeightFormat
from engine.kernels.packing import PackedStorage
from engine.kernels.triton import invariant, launch, linear, sampling
from engine.kernels.triton.batch import BatchTables, TileSet, Tiling
from engine.kernels.triton.kernels import PROMPT_WIDTH
from engine.kernels.triton.launch import Scoring, stored_rows
from kvcache.kv_buffer import Int8KVBuffer, LayerKV, allocate_kv_buffers
from kvcache.spec import AttentionRange, GroupSpec

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Pointers and integers of a multiple of 16 are known to be such when a kernel is compiled.
_ALIGNMENT = 16
_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Shape:
    """Attention of a model over cells of a format.

    latent  columns of a latent, at the beginning of the key; 0: no latent attention
    cells   of the pool
    """

    name: str
    heads: int
    key_heads: int
    width: int
    value_width: int
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    latent: int = 0
    softcap: float | None = None
    has_sinks: bool = False
    cells: int = 4096


SHAPES = (
    Shape("Qwen3-0.6B", 16, 8, 128, 128),
    Shape("Qwen3-8B", 32, 8, 128, 128),
    Shape("Qwen3-8B, int8 cells", 32, 8, 128, 128, kv_dtype=torch.int8),
    Shape("Qwen3-8B, float32", 32, 8, 128, 128, torch.float32, torch.float32),
    Shape("Qwen3-8B, 20 million cells", 32, 8, 128, 128, cells=20 * 10**6),
    Shape("SmolLM2-135M", 9, 3, 64, 64),
    Shape("gpt-oss-20b", 64, 8, 64, 64, has_sinks=True),
    Shape("Gemma 3 4B", 8, 4, 256, 256),
    Shape("Gemma 2 9B", 16, 8, 256, 256, softcap=50.0),
    Shape("Gemma 3 4B, float32", 8, 4, 256, 256, torch.float32, torch.float32),
    Shape("DeepSeek-V3", 128, 1, 576, 512, latent=512),
    Shape("DeepSeek-V3, int8 cells", 128, 1, 576, 512, kv_dtype=torch.int8, latent=512),
    Shape("DeepSeek-V3, float32", 128, 1, 576, 512, torch.float32, torch.float32, latent=512),
    Shape("Phi-3 mini (width 96)", 32, 32, 96, 96),
)
# Of weights: each number of bits and each kind of scales.
FORMATS: tuple[WeightFormat, ...] = ("int8", "int4", "q5_1", "q4_k", "q6_k", "iq4_xs")


@dataclass(frozen=True)
class Launch:
    """One call of a kernel."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes; bytes are those of a thread (spilled) and of a program (shared)."""

    target: str
    shape: str
    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


class _Recorder:
    """Stands for a kernel and keeps its calls."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **constants: self._launches.append(Launch(self._kernel, arguments, constants))


@contextmanager
def recorded(module: ModuleType = launch) -> Iterator[list[Launch]]:
    """The launches of a module inside the block, none of which runs."""
    launches: list[Launch] = []
    names = [name for name in vars(module) if name.endswith("_kernel")]
    with patch.multiple(module, **{name: _Recorder(getattr(module, name), launches) for name in names}):
        yield launches


def first_launch(module: ModuleType, call: Callable[[], object]) -> Launch:
    """The first kernel of a call, which does not run."""
    with recorded(module) as launches:
        call()
    return launches[0]


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def products_of(format: WeightFormat) -> dict[str, Launch]:
    """By name, the products of few and of many rows with a matrix of a format, those of experts, and an embedding."""
    matrix = PackedStorage([(64, 4096, format)]).allocate(64, 4096, format)
    one, many, tiles = on_meta(1, 4096), on_meta(512, 4096), on_meta(8, 3, dtype=torch.int32)
    weights, tokens = linear.packed_weights(matrix), on_meta(8, dtype=torch.int64)
    calls = {
        "decode, product": lambda: linear.multiply(one, weights, linear.FEW_ROWS),
        "decode, experts": lambda: linear.multiply(one, weights, linear.FEW_ROWS, tiles=tiles),
        "decode, embedding": lambda: linear.embed(tokens, weights),
        "prompt, product": lambda: linear.multiply(many, weights, linear.MANY_ROWS),
        "batch invariant, product": lambda: linear.multiply(one, weights, linear.one_tile(torch.bfloat16)),
        "float32, product": lambda: linear.multiply(one.float(), weights, linear.one_tile(torch.float32)),
    }
    return {name: first_launch(linear, call) for name, call in calls.items()}


def other_launches() -> dict[tuple[str, str], Launch]:
    """The sum of splits, row-invariant products and sums, and sampling, by kind and name."""
    product, rows = invariant.TritonProduct(), on_meta(8, 4096)
    found = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        own, weight = rows.to(dtype), on_meta(4096, 4096, dtype=dtype)
        batch = on_meta(2, 8, 4096, dtype=dtype)
        found |= {
            (name, "batch invariant, product"): first_launch(linear, partial(product.linear, own, weight)),
            (name, "batch invariant, batch"): first_launch(linear, partial(product.batch, batch, batch.mT)),
            (name, "batch invariant, sum"): first_launch(invariant, partial(product.sums, own)),
        }
    with recorded(linear) as launches:
        product.linear(rows, on_meta(4096, 4096))
    found["bfloat16", "sum of splits"] = launches[1]
    logits, numbers = on_meta(8, 151936, dtype=torch.float32), on_meta(8, dtype=torch.int64)
    call = partial(sampling.noisy_argmax, logits, logits[:, :1], numbers, numbers)
    found["float32", "decode, sampling"] = first_launch(sampling, call)
    return found


def launches_of(shape: Shape) -> dict[str, Launch]:
    """By name, the kernels of a decoded token, of a prompt and of a store."""
    spec = GroupSpec(
        shape.key_heads,
        shape.width,
        0 if shape.latent else shape.value_width,
        AttentionRange(),
        (0,),
        (None,),
        shape.latent,
    )
    keys, values = (
        LayerKV(one, 0) for one in allocate_kv_buffers(spec, shape.cells, shape.kv_dtype, torch.device("meta"))
    )
    stored_keys = stored_rows(keys)
    stored_values = stored_rows(values)
    assert stored_keys is not None
    assert stored_values is not None
    if shape.latent:
        stored_values = launch.StoredRows(stored_keys.numbers, stored_keys.scales, shape.latent)
    tiling = Tiling.for_dtype(shape.dtype)
    parts = keys.buffer.parts if isinstance(keys.buffer, Int8KVBuffer) else ()

    def rows(count: int, heads: int, width: int) -> Tensor:
        return torch.empty(count, heads, width, dtype=shape.dtype, device="meta").transpose(0, 1)

    def attend(lanes: int, splits: int) -> list[Launch]:
        query = rows(8, shape.heads, shape.width)
        sinks = torch.empty(shape.heads, dtype=shape.dtype, device="meta") if shape.has_sinks else None
        tables = BatchTables(
            torch.empty(4096, dtype=torch.int64, device="meta"),
            torch.empty(2, 8, dtype=torch.int32, device="meta"),
            (TileSet(torch.empty(8, 7, dtype=torch.int32, device="meta"), lanes, splits, 8),),
        )
        columns = launch.key_columns(stored_keys, shape.width, parts)
        scoring = Scoring(shape.width**-0.5, shape.softcap, sinks)
        with recorded() as launches:
            launch.attend(query, stored_keys, stored_values, columns, tables, scoring, tiling)
        return launches

    def stored() -> list[Launch]:
        with recorded() as launches:
            launch.store(
                keys,
                values,
                torch.empty(8, dtype=torch.int64, device="meta"),
                rows(8, shape.key_heads, shape.width),
                rows(8, shape.key_heads, 0 if shape.latent else shape.value_width),
            )
            if parts:
                launch.transform(rows(8, shape.heads, shape.width), parts)
        return launches

    split, join = attend(tiling.decode, 8)
    named = {
        "decode, split": split,
        "decode, join": join,
        "decode, one split": attend(tiling.decode, 1)[0],
        "prompt": attend(tiling.prompt if shape.width <= PROMPT_WIDTH else tiling.decode, 1)[0],
    }
    return named | dict(zip(("store", "transform"), stored(), strict=False))


def compiled(one: Launch, target: GPUTarget) -> Any:
    """The kernel of a launch for a GPU, which need not be there."""
    options = {name: value for name, value in one.constants.items() if name not in one.kernel.arg_names}
    constants = {
        (one.kernel.arg_names.index(name),): one.constants[name] for name in one.constants if name not in options
    }
    signature, attributes = dict.fromkeys(one.kernel.arg_names, "constexpr"), {}
    for at, (parameter, value) in enumerate(zip(one.kernel.params, one.arguments, strict=False)):
        is_special = not parameter.do_not_specialize
        if isinstance(value, Tensor):
            signature[parameter.name], aligned = _POINTERS[value.dtype], True
        elif isinstance(value, float):
            signature[parameter.name], aligned = "fp32", False
        elif value == 1 and is_special:
            constants[(at,)], aligned = 1, False
        else:
            signature[parameter.name], aligned = "i32", value % _ALIGNMENT == 0 and is_special
        if aligned:
            attributes[(at,)] = [["tt.divisibility", _ALIGNMENT]]
    source = ASTSource(fn=one.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def resources(shape: str, name: str, one: Launch, target: str) -> Resources:
    """The registers, spills and shared memory of a kernel."""
    made = compiled(one, TARGETS[target])
    if "cubin" in made.asm:
        registers, spilled = _of_cubin(made.asm["cubin"])
    else:
        registers, spilled = _of_amdgcn(made.asm["amdgcn"])
    return Resources(target, shape, name, registers, spilled, made.metadata.shared)


def _of_cubin(cubin: bytes) -> tuple[int, int]:
    tool = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def _of_amdgcn(text: str) -> tuple[int, int]:
    numbers = {
        name: int(value) for name, value in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", text)
    }
    return numbers["vgpr_count"], numbers["private_segment_fixed_size"]


def table(rows: list[Resources]) -> str:
    """A table in Markdown, one row a kernel and one column a target."""
    targets = list(dict.fromkeys(row.target for row in rows))
    cells: dict[tuple[str, str], dict[str, Resources]] = {}
    for row in rows:
        cells.setdefault((row.shape, row.kernel), {})[row.target] = row
    lines = ["| model or format | kernel | " + " | ".join(targets) + " |", "|---|---|" + "---|" * len(targets)]
    for (shape, kernel), by_target in cells.items():
        texts = [f"{one.registers} / {one.spilled_bytes} / {one.shared_bytes / 1024:.0f}" for one in by_target.values()]
        lines.append(f"| {shape} | {kernel} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def launches_on(target: str) -> dict[tuple[str, str], Launch]:
    """All kernels with their sizes on a target, by model or format and name."""
    with patch.object(launch, "warp_threads", lambda device: TARGETS[target].warp_size):
        found = {(shape.name, name): one for shape in SHAPES for name, one in launches_of(shape).items()}
    found |= {(format, name): one for format in FORMATS for name, one in products_of(format).items()}
    return found | other_launches()


def main() -> None:
    parser = command_parser("gpu.kernels", __doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    add_json_option(parser)
    parser.add_argument("--only", default="", help="part of the names of shapes and kernels")
    options = parser.parse_args()
    rows = [
        resources(*names, one, target)
        for target in options.target or TARGETS
        for names, one in launches_on(target).items()
        if options.only in ", ".join(names)
    ]
    print(table(rows))
    if options.json:
        measured("gpu_kernels", map(asdict, rows), f"triton {triton.__version__}").write(options.json)


if __name__ == "__main__":
    main()
