"""Outliers of trained models, planted in tiny random ones: in key columns, norms, embeddings and attention sinks.

`python -W ignore -m tests.engine.kit.outliers [NAME ...]` calibrates every family with outliers, in bfloat16 and in
float32, and prints the narrowest margins (minutes).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from engine.model import hooks, recurrence
from engine.model.layers import CachedLayer, find_cached_layers
from engine.model.margins import Margin, recording
from engine.native.decoder import UnsupportedArchitecture
from engine.native.detection import find_decoder
from engine.native.float32_mode import Float32Mode
from tests.engine.kit.tiny import FAMILIES, VOCABULARY, settings
from tests.engine.native.decoders import CONTEXT

# Factor of an outlier; Gemma 3 270M has key columns 60 times as large as the median.
TIMES = 32.0
_KEYS = re.compile(r"k_proj|key|qkv|c_attn|kv_b|kv_a")


def plant(model: Any, head: int = 16) -> None:
    """Scale a few columns of keys, norms and embeddings, and all attention sinks.

    head  width of a key head; the last column of each half of a head rotates slowest in either layout
    """
    slow = slice(head // 2 - 1, None, head // 2)
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kind = name.lower()
            if kind.endswith("sinks"):
                parameter *= TIMES
            elif parameter.dim() == 1 and "norm" in kind or parameter.dim() == 2 and _KEYS.search(kind):
                parameter[slow] *= TIMES
        # Few: with tied weights each of them makes outliers of all logits.
        table[:, :1] *= TIMES


def model_of(name: str, dtype: torch.dtype, *, outliers: bool = True) -> Any:
    """The tiny model of a family with hooks installed; weights of both dtypes are equal."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **settings(name))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    if outliers:
        plant(model)
    for parameter in model.requires_grad_(False).parameters():
        # Cast twice: weights of both dtypes are bfloat16 numbers. Frequency tables stay float32.
        parameter.data = parameter.to(torch.bfloat16).to(dtype)
    hooks.install_latent(model)
    hooks.install_bias(model)
    recurrence.install(model)
    model.set_attn_implementation(hooks.ATTENTION_NAME)
    return model


def planned(
    name: str, dtype: torch.dtype, *, outliers: bool = True
) -> tuple[tuple[CachedLayer, ...], tuple[Margin, ...]]:
    """The cached layers of a family's model, and the margins of the decisions."""
    with recording() as margins:
        layers = find_cached_layers(model_of(name, dtype, outliers=outliers), vocabulary=VOCABULARY)
    return layers, margins.narrowest


def native_reason(name: str) -> str | None:
    """Why the native step cannot run a family's model with outliers in bfloat16; None: it can."""
    model = model_of(name, torch.bfloat16)
    layers = find_cached_layers(model, vocabulary=VOCABULARY)
    try:
        with Float32Mode(model):
            find_decoder(model, layers, vocabulary=VOCABULARY, context=CONTEXT)
    except UnsupportedArchitecture as error:
        return error.reason
    return None


def main(names: Sequence[str]) -> None:
    """Print whether both dtypes have equal layers, and the margins in bfloat16."""
    for name in names:
        try:
            (wide, _), (narrow, margins) = (planned(name, dtype) for dtype in (torch.float32, torch.bfloat16))
        except Exception as error:
            sys.stdout.write(f"{name}: not planned, {type(error).__name__}\n")
            continue
        kinds = ["-" if one.spec.rotation is None else len(one.spec.rotation.inverse_frequency) for one in narrow]
        sys.stdout.write(f"{name}: {'one plan' if wide == narrow else 'TWO PLANS'} {kinds}\n")
        for margin in margins:
            sys.stdout.write(f"    {margin}\n")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main(sys.argv[1:] or sorted(FAMILIES))
