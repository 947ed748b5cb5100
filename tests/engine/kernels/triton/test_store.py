"""The Triton kernels store the bits that kvcache.kv_buffer stores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcache.kv_buffer import CellIndex, LayerKV, allocate_kv_buffers, hadamard_transform, store_rows
from kvcache.spec import AttentionRange, GroupSpec
from tests.engine.kernels.triton.interpreter import DEVICE, TritonKernels, buffer_on_device, launch

RUN, LISTED = slice(2, 7), torch.tensor([8, 1, 5, 0, 3])


def layers(width: int, value_width: int, dtype: torch.dtype, *, latent_width: int = 0) -> tuple[LayerKV, LayerKV]:
    """Layer 1 of empty buffers of 10 cells and 2 heads."""
    heads = 1 if latent_width else 2
    spec = GroupSpec(heads, width, value_width, AttentionRange(), (0, 1), (None, None), latent_width)
    keys, values = allocate_kv_buffers(spec, 10, dtype, torch.device("cpu"))
    return LayerKV(keys, 1), LayerKV(values, 1)


def stored(
    keys: LayerKV, values: LayerKV, cells: CellIndex, key_rows: Tensor, value_rows: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """By name, the tensors of the buffers after both stores."""
    own = tuple(LayerKV(buffer_on_device(one.buffer), 1) for one in (keys, values))
    index = cells.to(DEVICE) if isinstance(cells, Tensor) else cells
    TritonKernels().store(own[0], own[1], index, key_rows.to(DEVICE), value_rows.to(DEVICE))
    store_rows(keys, values, cells, key_rows, value_rows)
    return {
        f"{kind}.{name}": (theirs, ours.buffer.tensors[name].cpu())
        for kind, layer, ours in (("keys", keys, own[0]), ("values", values, own[1]))
        for name, theirs in layer.buffer.tensors.items()
    }


@pytest.mark.parametrize("cells", [RUN, LISTED], ids=["run", "listed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_stored_bits_equal_torch(dtype: torch.dtype, cells: CellIndex) -> None:
    """Keys of a width that is no power of two; rows of a transposed view, as those of models are."""
    torch.manual_seed(0)
    key_rows, value_rows = torch.randn(5, 2, 48).transpose(0, 1), torch.randn(2, 5, 20)
    if dtype == torch.bfloat16:
        # Triton's interpreter truncates where GPUs round.
        key_rows, value_rows = key_rows.bfloat16(), value_rows.bfloat16()

    for expected, actual in stored(*layers(48, 20, dtype), cells, key_rows, value_rows).values():
        assert torch.equal(expected, actual)


def test_int8_latents_are_stored_in_two_parts() -> None:
    torch.manual_seed(0)
    rows = torch.randn(1, 5, 40).bfloat16()

    tensors = stored(*layers(40, 0, torch.int8, latent_width=32), RUN, rows, rows[..., :0])

    assert (2, 1, 10, 2) == tensors["keys.scales"][1].shape
    assert all(torch.equal(*pair) for pair in tensors.values())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in which the interpreter computes
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_reads_back_as_nan(bad: float) -> None:
    """In its own row alone; zeros stay zeros."""
    keys, values = layers(16, 16, torch.int8)
    rows = torch.zeros(2, 5, 16)
    rows[1, 3, 7] = bad
    own = tuple(LayerKV(buffer_on_device(one.buffer), 1) for one in (keys, values))

    TritonKernels().store(own[0], own[1], RUN, rows.to(DEVICE), rows.to(DEVICE))

    for layer in own:
        read = layer.read(RUN, torch.float32).cpu()
        assert read[1, 3].isnan().all()
        read[1, 3] = 0
        assert torch.equal(torch.zeros(2, 5, 16), read)


def test_float64_is_stored_by_torch() -> None:
    keys, values = layers(8, 8, torch.float64)
    rows = torch.randn(2, 5, 8, dtype=torch.float64)

    for expected, actual in stored(keys, values, RUN, rows, rows).values():
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("parts", [(64,), (48,), (32, 8), (7,)])
def test_transform_has_the_bits_of_torch(parts: tuple[int, ...]) -> None:
    rows = torch.randn(3, 4, sum(parts), generator=torch.Generator().manual_seed(0))
    expected = torch.cat([hadamard_transform(part) for part in rows.split(parts, -1)], -1)

    assert torch.equal(expected, launch.transform(rows.to(DEVICE), parts).cpu())
