"""Text after images with an MTP layer or a draft model: the text equals `generate`, and both draft for texts alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.config import EngineConfig
from engine.core import Core
from engine.draft.loading import load_draft, make_speculation
from engine.draft.mtp_head import MtpHead
from engine.load.load import LoadedModel, load
from engine.media.encoder import CapturingEncoder
from engine.types.content import Content, Upload
from engine.types.request import Request
from tests.engine.draft.mtp_models import mtp_weights
from tests.engine.kit.content_models import save_content_model
from tests.engine.kit.contents import FAMILIES
from tests.engine.kit.models import core
from tests.engine.kit.play import Job, ask, play
from tests.engine.media.processors import media_processor, png

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

_CONTEXT, _COUNT = 128, 12
_TEXT = (5, 6, 7, 20, 21, 22)


def _add_mtp(folder: Path) -> None:
    """Add an MTP layer like the last layer, by the names of published checkpoints."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    text = {name.replace("model.language_model.", "model."): values for name, values in weights.items()}
    torch.manual_seed(0)
    save_file(weights | mtp_weights(text, 3, apart=True), file, metadata={"format": "pt"})


def _save_draft_model(source: Path, folder: Path) -> Path:
    """A text model with the tokenizer of another one."""
    settings = {**FAMILIES["llava"].settings["text_config"], "num_hidden_layers": 1}
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def _served(config: EngineConfig) -> tuple[LoadedModel, Core]:
    loaded = load(config, lambda _: None)
    draft = load_draft(config, loaded, lambda _: None)
    assert isinstance(draft, MtpHead) == (config.drafter == "mtp")
    speculation = make_speculation(config, loaded, draft, lambda: 0.0)
    return loaded, core(loaded, context=_CONTEXT, chunk=32, speculation=speculation)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["mtp", "model"])
def test_text_after_an_image_is_that_of_generate(drafter: str, tmp_path: Path) -> None:
    """Beside a text, for which drafts are made, and again with the image's prefix in the cache."""
    source = tmp_path / "model"
    whole = save_content_model("qwen3_5", source)
    _add_mtp(source)
    draft_model = str(_save_draft_model(source, tmp_path / "draft")) if drafter == "model" else None
    loaded, engine = _served(
        EngineConfig(
            model=str(source),
            dtype="float32",
            context=_CONTEXT,
            drafter="mtp" if drafter == "mtp" else "model",
            draft_model=draft_model,
            draft_tokens=3,
        )
    )
    encoder = loaded.content_encoder
    assert isinstance(encoder, CapturingEncoder)
    processed = media_processor(source).process(Upload("image", png(50, 40), ""))
    tokens = tuple(loaded.tokenizer.encode(processed.replacement, add_special=False))
    content: Content = replace(encoder.samples[0].content, start=3, stop=3 + len(tokens), arrays=processed.arrays)
    prompt = (5, 6, 7, *tokens, 8, 9, 10, 11)

    def request(name: str) -> Request:
        return ask(name, prompt, _COUNT, contents=(content,), ignore_eos=True)

    image = play(engine, [Job(request("image"))])["image"].tokens
    drafted_after_image = sum(sum(counts.drafted) for counts in engine.stats().drafts)
    answers = play(engine, [Job(ask("text", _TEXT, _COUNT, ignore_eos=True)), Job(request("again"), 2)])

    settings = {"do_sample": False, "max_new_tokens": _COUNT, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        expected = whole.generate(**encoder.reference_inputs(list(prompt), content), **settings)
        whole.base_model.rope_deltas = None
        text = whole.generate(torch.tensor([_TEXT]), **settings)
    assert image == expected[0, len(prompt) :].tolist()
    assert answers["again"].tokens == image
    assert answers["text"].tokens == text[0, len(_TEXT) :].tolist()
    assert drafted_after_image == 0
    (counts,) = (counts for counts in engine.stats().drafts if counts.kind == drafter)
    assert sum(counts.drafted) > 0
