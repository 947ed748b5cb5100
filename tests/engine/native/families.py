"""The families of docs/models-checked.md in the native step: tiny models, and the reasons of unsupported ones.

`python -W ignore -m tests.engine.native.families [NAME ...]` prints all of them (a minute), or some.
"""

from __future__ import annotations

import sys

import torch
import transformers

from engine.native.decoder import UnsupportedArchitecture
from engine.native.detection import find_decoder
from engine.run.sequential import SequentialRunner
from tests.engine.kit.families import build
from tests.engine.kit.tiny import FAMILIES, VOCABULARY
from tests.engine.native.decoders import CONTEXT

_NAMES = """
    arcee aria_text axk1 bamba cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 dots1 ernie4_5
    ernie4_5_moe exaone4 exaone_moe flex_olmo flint fuyu gemma gemma2 gemma3_text gemma4_text
    gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt_neox gpt_oss granite granite_swa granitemoe
    granitemoe_swa granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
    internlm3 iquestcoder jais2 kolibri1 lfm2 lfm2_moe llama llama4_text mamba2 mellum minimax_m2 ministral ministral3
    mistral mixtral nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe persimmon phi phi3 qwen2 qwen2_moe
    qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open stablelm starcoder2
    vaultgemma youtu
"""
NATIVE = frozenset(_NAMES.split())


def reason(name: str) -> str | None:
    """Why the native step does not support a family; None: it does."""
    family = build(name)
    for parameter in family.model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() == 1:
            parameter += 0.3 * torch.randn_like(parameter)
    if isinstance(family.runner, SequentialRunner):
        return "it runs one sequence at a time"
    try:
        find_decoder(family.model, family.runner.layers, vocabulary=VOCABULARY, context=CONTEXT)
    except UnsupportedArchitecture as error:
        return error.reason
    return None


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for asked in sys.argv[1:] or sorted(FAMILIES):
        sys.stdout.write(f"{asked}: {reason(asked) or 'native'}\n")
        sys.stdout.flush()
