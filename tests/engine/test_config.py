"""The settings of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import ConfigError, EngineConfig


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("kernels", "cuda", "kernels must be one of auto, torch, not cuda"),
        ("mla", "latent", "mla must be one of auto, absorb, expand, not latent"),
        ("kv_dtype", "int3", "kv_dtype must be one of auto, float32, .*, not int3"),
        ("drafter", "", "drafter must be one of auto, none, .*, not $"),
        ("context", 4, "context must be at least 8, not 4"),
    ],
)
def test_an_unknown_value_is_refused_by_its_setting(setting: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(**{setting: value})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "compile is for GPUs: choose one with --device"),
        ({"device": "cuda", "batch_invariant": True}, "compile fuses sums whose bits change with the batch; leave out"),
        ({"device": "cuda", "tensor_parallel": 2}, "compile True is not supported with --tensor-parallel 2"),
    ],
)
def test_compile_is_refused_where_it_cannot_work(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(compile=True, **settings)
