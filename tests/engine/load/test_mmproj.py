"""A GGUF file with a vision tower beside it (mmproj) is the whole model of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import dequantize, quantize

from engine.config import EngineConfig
from engine.load.load import LoadedModel, load
from engine.load.plan.model_plan import plan_model
from engine.load.read.configuration import read_headers
from engine.load.read.modalities import text_only_reason
from engine.load.read.processor_files import processor_folder
from engine.media.encoder import CapturingEncoder
from engine.text.contents import ProcessedContent
from engine.types.content import Upload
from engine.types.request import Request
from tests.engine.gguf.mmproj import FAMILIES, stored_type, write_mmproj, write_pair
from tests.engine.kit.content_models import save_content_model
from tests.engine.kit.media_in_process import use_media_in_process
from tests.engine.kit.models import core
from tests.engine.kit.play import GREEDY, Job, play
from tests.engine.media.processors import media_processor, png

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

# One family in every run.
ALWAYS = ("gemma3",)


@pytest.fixture(autouse=True)
def media_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    use_media_in_process(monkeypatch)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def _config(file: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(file), dtype="float32", context=512, **settings)


def _load(file: Path, **settings: Any) -> LoadedModel:
    return load(_config(file, **settings), lambda _: None)


def _answers(loaded: LoadedModel, whole: Any, processed: ProcessedContent) -> tuple[list[int], list[int]]:
    """The tokens that the engine and `generate` append to a prompt with an image."""
    encoder = loaded.content_encoder
    assert isinstance(encoder, CapturingEncoder)
    tokens = tuple(loaded.tokenizer.encode(processed.replacement, add_special=False))
    content = replace(encoder.samples[0].content, start=3, stop=3 + len(tokens), arrays=processed.arrays)
    prompt = [5, 6, 7, *tokens, 8, 9, 10, 11]
    request = Request(id="0", prompt=tuple(prompt), contents=(content,), sampling=GREEDY, max_tokens=8, ignore_eos=True)
    answer = play(core(loaded, context=512, chunk=32), [Job(request)])["0"].tokens
    inputs = encoder.reference_inputs(prompt, content)
    with torch.inference_mode():
        expected = whole.generate(**inputs, do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0)
    return list(answer), expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow])
        for name in FAMILIES
        if name != "gemma3_wide"
    ],
)
def test_answer_to_an_image_is_that_of_the_checkpoint(name: str, source: Path, target: Path) -> None:
    whole = save_content_model(name, source)
    file = write_pair(name, source, target)

    loaded = _load(file)

    info = loaded.info
    assert (info.input_modalities, info.text_only_reason) == (("text", "image"), "")
    unread = ".encoder.layers.1." if name == "llava" else None
    parameters = [values for key, values in whole.named_parameters() if unread is None or unread not in key]
    assert info.parameters == sum(values.numel() for values in parameters)
    upload = Upload("image", png(50, 40), "")
    processed = media_processor(source).process(upload)
    folder = processor_folder("model", read_headers("model", file, _config(file))[0])
    assert media_processor(folder).process(upload).arrays == processed.arrays
    answer, expected = _answers(loaded, whole, processed)
    assert answer == expected
    planned = plan_model(_config(file), file)
    assert (planned.parameters, planned.weights_bytes) == (info.parameters, loaded.memory.weights_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("matrix_type", ["F16", "BF16", "Q8_0"])
def test_matrices_of_other_types_are_dequantised(matrix_type: str, source: Path, target: Path) -> None:
    whole = save_content_model("gemma3_wide", source)
    file = write_pair("gemma3_wide", source, target)
    write_mmproj("gemma3_wide", source, target / "mmproj-model-f32.gguf", matrix_type=matrix_type)
    unchanged = {name: values.clone() for name, values in whole.named_parameters()}
    for name, values in whole.named_parameters():
        if "vision_tower" in name or "multi_modal_projector" in name:
            kind = stored_type(values, matrix_type)
            values.copy_(torch.from_numpy(dequantize(quantize(values.numpy(), kind), kind)).view_as(values))

    loaded = _load(file)

    towers = {name for name, values in whole.named_parameters() if not torch.equal(values, unchanged[name])}
    parameters = dict(loaded.model.named_parameters())
    assert len(towers) > 10
    assert all(torch.equal(parameters[name], whole.get_parameter(name)) for name in towers)
    answer, expected = _answers(loaded, whole, media_processor(source).process(Upload("image", png(50, 40), "")))
    assert answer == expected


@pytest.mark.slow
def test_without_media_the_text_alone_is_loaded(source: Path, target: Path) -> None:
    save_content_model("gemma3", source)
    file = write_pair("gemma3", source, target)

    info = _load(file, no_media=True).info

    assert (info.architecture, info.text_only_reason) == ("Gemma3ForCausalLM", "--no-media")
    assert info.unread_modalities == ("image",)
    assert plan_model(_config(file, no_media=True), file).parameters == info.parameters


def test_tower_of_another_width_is_not_used(source: Path, target: Path) -> None:
    save_content_model("gemma3", source)
    file = write_pair("gemma3", source, target)
    write_mmproj("gemma3", source, target / "mmproj-model-f32.gguf", width=64)

    checkpoint, config = read_headers("model", file, _config(file))

    assert (checkpoint.tower, config.model_type) == (None, "gemma3_text")
    reason = "mmproj-model-f32.gguf: it is for a language model of width 64, not 32"
    assert text_only_reason(checkpoint, config, _config(file)) == reason
    assert plan_model(_config(file), file).architecture == "Gemma3ForCausalLM"
