"""Products of quantised weights have the same bits on arm64, in each variant, as on this machine."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kernels.cpu.build import libraries
from engine.kernels.cpu.products.linear import WEIGHT_FORMATS, NativeLinear
from engine.kernels.formats import LAYOUTS, WeightFormat
from engine.kernels.packing import PackedMatrix
from tests.arm64.machine import MISSING, NEEDED, PROCESSORS, compile_library, compile_program, run
from tests.engine.kernels.weights import random_matrix
from tests.libraries import built

pytestmark = [
    pytest.mark.arm64,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(MISSING), reason=NEEDED),
    pytest.mark.skipif(libraries.variants("linear")[0] == "generic", reason="no fused multiplications to compare with"),
]

# One row, rows of one tile, and of several; outputs and columns with and without whole blocks and superblocks.
COUNTS = (1, 2, 3, 6, 7, 13, 40)
SHAPES = ((48, 256), (75, 333))


@dataclass(frozen=True)
class Case:
    """Rows and a matrix."""

    format: WeightFormat
    rows: Tensor
    matrix: PackedMatrix

    def to_bytes(self) -> bytes:
        """The input of products.cpp."""
        stored = (self.matrix.codes, self.matrix.scales)
        codes, scales = (part.contiguous().view(torch.uint8).numpy().tobytes() for part in stored)
        sizes = (*self.rows.shape, self.matrix.outputs, WEIGHT_FORMATS[self.format], len(codes), len(scales))
        return struct.pack("<6q", *sizes) + self.rows.numpy().tobytes() + codes + scales


def cases() -> list[Case]:
    """For each format and shape."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for format in LAYOUTS:
        for outputs, columns in SHAPES:
            matrix = random_matrix(format, outputs, columns)
            for count in COUNTS:
                rows = torch.randn(count, columns, generator=generator)
                rows[:, 7] *= 50
                found.append(Case(format, rows, matrix))
    return found


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """products.cpp for arm64."""
    program = tmp_path_factory.mktemp("program") / "products"
    compile_program(Path(__file__).with_name("products.cpp"), program)
    return program


@pytest.mark.parametrize("variant", PROCESSORS)
def test_products_have_the_bits_of_this_machine(variant: str, program: Path, tmp_path: Path) -> None:
    native = NativeLinear(built("linear"))
    library = compile_library("linear", variant, tmp_path)
    every = cases()
    (tmp_path / "cases").write_bytes(b"".join(case.to_bytes() for case in every))

    run(PROCESSORS[variant], program, library, tmp_path / "cases", tmp_path / "results")

    results = torch.frombuffer(bytearray((tmp_path / "results").read_bytes()), dtype=torch.float32)
    expected = [native.multiply(case.rows, [case.matrix])[0] for case in every]
    for case, own, actual in zip(every, expected, results.split([own.numel() for own in expected]), strict=True):
        assert torch.equal(own.flatten(), actual), (case.format, tuple(case.rows.shape))
