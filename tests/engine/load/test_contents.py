"""Multimodal models with a processor are loaded with their vision tower; the others, and with no_media, as text."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.config import EngineConfig
from engine.load.load import LoadedModel, load
from engine.load.plan.model_plan import plan_model
from engine.media.encoder import CapturingEncoder
from engine.model import hooks
from engine.types.content import Content
from engine.types.request import Request
from tests.engine.kit.content_models import CONTENT_MODELS, save_content_model
from tests.engine.kit.media_in_process import use_media_in_process
from tests.engine.kit.models import core
from tests.engine.kit.play import GREEDY, Job, play

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


# One family in every run.
ALWAYS = ("qwen2_vl",)


@pytest.fixture(autouse=True)
def media_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    use_media_in_process(monkeypatch)


def _config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", context=512, **settings)


def _load(folder: Path, **settings: Any) -> LoadedModel:
    return load(_config(folder, **settings), lambda _: None)


def _prompt(loaded: LoadedModel) -> tuple[list[int], Content]:
    """The sample of the load between texts."""
    assert isinstance(loaded.content_encoder, CapturingEncoder)
    image = loaded.content_encoder.samples[0]
    content = replace(image.content, start=3, stop=3 + len(image.tokens))
    return [5, 6, 7, *image.tokens, 8, 9, 10, 11], content


def _answer(loaded: LoadedModel) -> tuple[int, ...]:
    tokens, content = _prompt(loaded)
    request = Request(id="0", prompt=tuple(tokens), contents=(content,), sampling=GREEDY, max_tokens=8, ignore_eos=True)
    return tuple(play(core(loaded, context=512, chunk=16), [Job(request)])["0"].tokens)


def _generate(whole: Any, loaded: LoadedModel) -> tuple[int, ...]:
    tokens, content = _prompt(loaded)
    inputs = loaded.content_encoder.reference_inputs(tokens, content)  # type: ignore[union-attr]
    with torch.inference_mode():
        answer = whole.generate(**inputs, do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0)
    return tuple(answer[0, len(tokens) :].tolist())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow]) for name in CONTENT_MODELS]
)
def test_model_with_a_processor_reads_contents(tmp_path: Path, name: str) -> None:
    whole = save_content_model(name, tmp_path)

    loaded = _load(tmp_path)

    info = loaded.info
    kind = CONTENT_MODELS[name].kind
    further = ("video",) if "video" in whole.input_modalities else ()
    assert (info.input_modalities, info.unread_modalities, info.text_only_reason) == (("text", kind), further, "")
    assert info.not_native_reason is None
    assert info.parameters == sum(parameter.numel() for parameter in whole.parameters())
    assert loaded.content_encoder is not None
    assert _answer(loaded) == _generate(whole, loaded)
    planned = plan_model(_config(tmp_path), tmp_path)
    assert (planned.parameters, planned.weights_bytes) == (info.parameters, loaded.memory.weights_bytes)
    assert planned.encoder_bytes == planned.available_bytes // 8
    assert loaded.model.config.get_text_config()._attn_implementation == hooks.ATTENTION_NAME
    config = loaded.model.config
    tower = config.audio_config if kind == "audio" else config.vision_config
    assert tower._attn_implementation == "sdpa"


def test_no_media_loads_the_text_alone(tmp_path: Path) -> None:
    save_content_model("llava", tmp_path)

    loaded = _load(tmp_path, no_media=True)

    info = loaded.info
    assert (info.input_modalities, info.unread_modalities) == (("text",), ("image",))
    assert info.text_only_reason == "--no-media"
    assert loaded.content_encoder is None
    assert plan_model(_config(tmp_path, no_media=True), tmp_path).parameters == info.parameters
    assert plan_model(_config(tmp_path), tmp_path).parameters > info.parameters


def test_folder_without_a_processor_is_served_as_text(tmp_path: Path) -> None:
    save_content_model("llava", tmp_path)
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").unlink()

    info = _load(tmp_path).info

    assert info.unread_modalities == ("image",)
    assert info.text_only_reason == "the folder has no processor_config.json or preprocessor_config.json"


def test_model_without_the_weights_of_its_tower_is_served_as_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_content_model("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    with safe_open(file, framework="pt") as content:
        names = [name for name in content.keys() if "vision" not in name]  # noqa: SIM118
        tensors = {name: content.get_tensor(name) for name in names}
    save_file(tensors, file, metadata={"format": "pt"})

    with caplog.at_level(logging.WARNING, "cellar.engine"):
        info = _load(tmp_path).info

    assert info.input_modalities == ("text",)
    assert "its files lack weights" in info.text_only_reason
    assert "is served as a text model" in caplog.text


@pytest.mark.slow
def test_broken_processor_is_named(tmp_path: Path) -> None:
    save_content_model("llava", tmp_path)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "NoProcessor"}')

    info = _load(tmp_path).info

    assert info.input_modalities == ("text",)
    assert "its processor cannot be read: transformers has no processor NoProcessor" in info.text_only_reason


def test_vision_tower_keeps_its_dtype_in_a_quantised_model(tmp_path: Path) -> None:
    save_content_model("llava", tmp_path)

    loaded = _load(tmp_path, quantize="int8")

    assert loaded.info.input_modalities == ("text", "image")
    tower = loaded.model.model.vision_tower
    assert all(parameter.dtype.is_floating_point for parameter in tower.parameters())
    assert {type(module).__name__ for module in tower.modules()} >= {"Linear"}
