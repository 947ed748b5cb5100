"""Calibration: the rotation and attention range of each layer, found in tiny models of many families."""

from __future__ import annotations

import pytest
import torch

from kvcache.rotary import rotate
from kvcache.spec import AttentionRange, Rotation
from tests.engine.kit.models import CONTEXT, Models
from tests.selection import quick

FULL, SLIDING = AttentionRange(), AttentionRange("window", 8)
# Of each layer: layout, first rotated column, number of pairs, and attention range. None: keys are not rotated.
EXPECTED = {
    "llama": [(("half", 0, 4), FULL)] * 2,
    "qwen3": [(("half", 0, 4), FULL)] * 2,
    "gemma": [(("half", 0, 4), FULL)] * 2,
    "phi3": [(("half", 0, 4), FULL)] * 2,
    "olmo2": [(("half", 0, 4), FULL)] * 2,
    "gpt_neox": [(("half", 0, 2), FULL)] * 2,
    "cohere": [(("interleaved", 0, 4), FULL)] * 2,
    "smollm3": [(("half", 0, 4), FULL), (("half", 0, 0), FULL)],
    "gemma2": [(("half", 0, 4), SLIDING), (("half", 0, 4), FULL)],
    "gemma3": [(("half", 0, 4), SLIDING), (("half", 0, 4), FULL)],
    "mistral": [(("half", 0, 4), AttentionRange("window", 6))] * 2,
    "gpt2": [(None, FULL)] * 2,
}


def shape(rotation: Rotation | None) -> tuple[str, int, int] | None:
    """A rotation without its frequencies."""
    return rotation and (rotation.layout, rotation.offset, len(rotation.inverse_frequency))


@pytest.mark.parametrize("dtype", quick(("bfloat16",), ("float64", "float32", "bfloat16")))
@pytest.mark.parametrize("family", EXPECTED)
def test_rotation_and_range_of_every_layer_are_found(loaded: Models, family: str, dtype: str) -> None:
    """Half, interleaved, partial and no rotation, learned positions and windows, in every dtype."""
    layers = loaded(family, dtype).layers

    assert EXPECTED[family] == [(shape(plan.spec.rotation), plan.spec.attention_range) for plan in layers]
    assert list(range(len(layers))) == [plan.index for plan in layers]


@pytest.mark.parametrize("family", ["llama", "gemma3", "cohere"])
def test_found_frequencies_are_the_model_tables(loaded: Models, family: str) -> None:
    model, layers = loaded(family).model, loaded(family).layers
    tables = [buffer.double() for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    key = torch.randn(1, 8, dtype=torch.float64)
    for plan in layers:
        assert plan.spec.rotation is not None
        rotated_keys = [
            rotate(key, -5, Rotation(plan.spec.rotation.layout, 0, tuple(table.tolist()))) for table in tables
        ]
        found = rotate(key, -5, plan.spec.rotation)

        assert any(torch.allclose(rotated, found, rtol=0, atol=1e-6) for rotated in rotated_keys)


def test_layers_of_one_model_may_rotate_differently(loaded: Models) -> None:
    """Gemma 3 rotates its sliding layers by another base than its full ones."""
    sliding, full = (plan.spec.rotation for plan in loaded("gemma3").layers)

    assert sliding != full


def test_layer_spec_has_key_heads_and_widths(loaded: Models) -> None:
    assert [(2, 8, 8)] * 2 == [
        (plan.spec.heads, plan.spec.key_width, plan.spec.value_width) for plan in loaded("llama").layers
    ]


def test_model_info_describes_the_loaded_model(loaded: Models) -> None:
    info = loaded("llama").info

    assert ("LlamaForCausalLM", "float64", 272, CONTEXT) == (
        info.architecture,
        info.dtype,
        info.vocabulary,
        info.context,
    )
    assert sum(parameter.numel() for parameter in loaded("llama").model.parameters()) == info.parameters
