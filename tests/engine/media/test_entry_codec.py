"""Entries as tensors: the same after a round trip, whatever arguments the decoder takes."""

from __future__ import annotations

import pytest
import torch

from engine.media.entry_codec import CONTENT_CODEC
from engine.step.content import ContentEntry

CPU = torch.device("cpu")


def test_arguments_keep_their_structure() -> None:
    """Nested branches, values that are no tensors, views and tensors that share memory."""
    rows, shared = torch.rand(3, 4), torch.rand(2, 4)
    entry = ContentEntry(
        b"key",
        rows[:, ::2],
        {"mask": torch.tensor([True, False, True]), "scale": {"a": (rows[0], None, 2), "b": []}},
        {"deepstack": [shared, shared.to(torch.bfloat16), shared]},
        torch.tensor([True, True, False]),
    )

    decoded = CONTENT_CODEC.decode(b"key", CONTENT_CODEC.encode(entry), CPU)

    torch.testing.assert_close(decoded.rows, entry.rows, rtol=0, atol=0)
    assert torch.equal(decoded.token_arguments["mask"], entry.token_arguments["mask"])
    scale = decoded.token_arguments["scale"]
    assert (type(scale["a"]), scale["a"][1:], scale["b"]) == (tuple, (None, 2), [])
    assert torch.equal(scale["a"][0], rows[0])
    assert [layer.dtype for layer in decoded.feature_arguments["deepstack"]] == [
        torch.float32,
        torch.bfloat16,
        torch.float32,
    ]
    assert torch.equal(decoded.feature_arguments["deepstack"][2], shared)
    assert torch.equal(decoded.features, entry.features)
    assert decoded.bytes == entry.bytes


def test_other_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="an argument has a set"):
        CONTENT_CODEC.encode(ContentEntry(b"key", torch.rand(1, 1), {"kinds": {1}}))
