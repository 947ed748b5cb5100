"""Adapters in the native step: the texts of native families are PEFT's, with the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.kit.adapters import AdaptedReference, change_weights, save_adapter
from tests.engine.kit.models import core, load_model
from tests.engine.kit.play import Job, ask, play

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = tuple(range(30, 54))
COUNT = 10
# Linear layers by a regular expression of PEFT, or by names.
ALL = r".*(_proj|gate_up_proj|qkv_proj|c_attn|query_key_value|dense|in_proj\w*|out_proj|w1|w2|w3|per_layer_\w+)"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FAMILIES: dict[str, str | list[str]] = {
    "gemma3": ALL,
    "phi3": ALL,
    "gpt_neox": ALL,
    "qwen3_next": [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"],
    "lfm2": ALL,
    "mamba2": r".*in_proj",
    "deepseek_v2": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
    "qwen3_moe": ATTENTION,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_native_families_are_those_of_peft(family: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Two adapters, of which one has bfloat16 factors, and the base in one batch, alone, and in chunks."""
    kind = {"target_modules": FAMILIES[family], "lora_dropout": 0.0}
    paths = {
        name: save_adapter(folder(family), tmp_path / name, kind | {"r": rank}, rank)
        for name, rank in (("a", 3), ("b", 8))
    }
    change_weights(paths["b"], lambda tensors: {name: matrix.bfloat16() for name, matrix in tensors.items()})
    model = load_model(folder(family), "float32", lora=tuple(f"{name}={path}" for name, path in paths.items()))
    assert model.info.not_native_reason is None
    asked = [ask(name, PROMPT, COUNT, adapter=name, logprobs=1, ignore_eos=True) for name in ("", "a", "b")]

    batched = play(core(model, slots=3), [Job(request) for request in asked])
    chunked = play(core(model, slots=3, chunk=5), [Job(request) for request in asked])

    for request in asked:
        alone = play(core(model, slots=1), [Job(request)])[request.id]
        reference = AdaptedReference(folder(family), paths.get(request.adapter), torch.float32)
        assert alone.tokens == reference.greedy(PROMPT, COUNT), request.adapter
        assert alone.logprobs == batched[request.id].logprobs == chunked[request.id].logprobs
    assert len({tuple(answer.tokens) for answer in batched.values()}) == 3
