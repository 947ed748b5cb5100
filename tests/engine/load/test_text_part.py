"""Multimodal models are loaded without their towers, and their text is that of the whole model alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.config import EngineConfig
from engine.errors import ModelUnsupported
from engine.load.load import load
from engine.load.plan.model_plan import plan_model
from engine.load.read.skeleton import model_class
from engine.types.request import Request
from tests.engine.kit.models import core, save_tokenizer
from tests.engine.kit.multimodal import NOT_NATIVE, REFUSED, TYPES, UNPLANNED, tiny_config, whole_model
from tests.engine.kit.play import GREEDY, Job, play
from tests.selection import quick

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

# One of each mechanism in every run: plain, three-axis positions, latents, windows and a text class of its own.
ALWAYS = ("gemma3", "kimi_k25", "mistral3", "qwen2_audio", "qwen3_5", "qwen3_vl")
_TOKENS = 12


def save(kind: str, folder: Path, **text: Any) -> Any:
    """The whole model of a type, in float64, after it has been saved."""
    model = whole_model(tiny_config(kind, **text), torch.float64)
    # The default, a grouped matrix product, does not support float64.
    model.set_experts_implementation("eager")
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def prompts() -> list[list[int]]:
    """Of three lengths; the first two share a prefix."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, 256, (40,), generator=generator).tolist()
    return [tokens, tokens[:30] + tokens[:5], tokens[33:]]


def generate(model: Any, prompt: list[int]) -> list[int]:
    """The tokens that the whole model appends to a prompt."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return list(answer[0, len(prompt) :].tolist())


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ALWAYS else [pytest.mark.slow]) for kind in sorted(TYPES)]
)
def test_text_is_that_of_the_whole_model(tmp_path: Path, kind: str) -> None:
    """In batches, chunks and with a cached prefix; the plan has the weights that are loaded."""
    whole = save(kind, tmp_path)
    loaded = load(EngineConfig(model=str(tmp_path), dtype="float64", context=128), lambda _: None)
    requests = [
        Request(id=str(number), prompt=tuple(prompt), sampling=GREEDY, max_tokens=_TOKENS, ignore_eos=True)
        for number, prompt in enumerate(prompts())
    ]
    answers = play(core(loaded, context=128, chunk=16), [Job(each, arrives=at) for at, each in enumerate(requests)])

    assert [answers[each.id].tokens for each in requests] == [generate(whole, prompt) for prompt in prompts()]
    inputs = (whole.input_modalities,) if isinstance(whole.input_modalities, str) else whole.input_modalities
    assert loaded.info.unread_modalities == tuple(name for name in inputs if name != "text")
    size = sum(parameter.numel() for parameter in whole.parameters())
    assert (loaded.info.parameters < size) == bool(loaded.info.unread_modalities)
    if kind not in UNPLANNED:
        planned = plan_model(EngineConfig(model=str(tmp_path), dtype="float64", context=128), tmp_path)
        assert (planned.parameters, planned.weights_bytes) == (loaded.info.parameters, loaded.memory.weights_bytes)


@pytest.mark.parametrize(
    "kind",
    quick(("gemma3", "kimi_k25"), sorted(TYPES)),
)
def test_native_step_of_the_text(tmp_path: Path, kind: str) -> None:
    model = whole_model(tiny_config(kind))
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)

    info = load(EngineConfig(model=str(tmp_path), dtype="float32", context=128), lambda _: None).info

    assert info.not_native_reason == NOT_NATIVE.get(kind)


def test_weights_of_towers_need_not_be_there(tmp_path: Path) -> None:
    """They are not read."""
    save("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    with safe_open(file, framework="pt") as content:
        names = [name for name in content.keys() if "vision" not in name and "projector" not in name]  # noqa: SIM118
        tensors = {name: content.get_tensor(name) for name in names}
    save_file(tensors, file, metadata={"format": "pt"})

    loaded = load(EngineConfig(model=str(tmp_path), dtype="float32", context=128), lambda _: None)

    assert loaded.info.unread_modalities == ("image",)


def test_library_of_a_tower_need_not_be_installed(tmp_path: Path) -> None:
    """The tower of Gemma 3n is made by timm."""
    config = tiny_config("gemma3n", num_kv_shared_layers=0)
    torch.manual_seed(0)
    model = model_class(config).from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert "vision_config" in json.loads((tmp_path / "config.json").read_text())

    loaded = load(EngineConfig(model=str(tmp_path), dtype="float32", context=128), lambda _: None)

    assert loaded.info.unread_modalities == ("image", "audio")


@pytest.mark.parametrize("kind", quick(sorted(REFUSED)[:1], sorted(REFUSED)))
def test_refused_type_names_the_reason(tmp_path: Path, kind: str) -> None:
    settings, reason = REFUSED[kind]
    save(kind, tmp_path, **settings)

    with pytest.raises(ModelUnsupported, match=reason):
        load(EngineConfig(model=str(tmp_path), dtype="float32", context=128), lambda _: None)
