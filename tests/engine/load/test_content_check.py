"""Packed batches with images or sounds are compared with the model alone at load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.errors import ModelUnsupported
from engine.load.check.selftest import ModelTraits, find_runner
from engine.load.read.skeleton import install_hooks, install_rope
from engine.media.encoder import CapturingEncoder
from engine.run.packed import PackedRunner
from engine.step.content import ContentEntry, PromptLayout
from tests.engine.kit.contents import FAMILIES, VOCABULARY, sample, tiny_model
from tests.selection import quick

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

# The experts of Llama 4 compute in float32 alone.
_DTYPES = {"llama4": torch.float32}
# Plain, of several sizes, positions of three axes, both directions, chunks, and sounds.
ALWAYS = ("llava", "pixtral", "qwen2_vl", "qwen3_vl", "gemma3", "gemma4", "llama4", "voxtral")


def _model(name: str, dtype: torch.dtype | None = None) -> tuple[Any, ModelTraits]:
    family = FAMILIES[name]
    chosen = dtype or _DTYPES.get(name, torch.float64)
    model = tiny_model(family, chosen)
    recurrent, switch = install_hooks(model), install_rope(name, model)
    contents = CapturingEncoder(model, [sample(family, model, 0)], budget_bytes=2**20)
    return model, ModelTraits(
        vocabulary=VOCABULARY, recurrent=recurrent, dtype=chosen, contents=contents, switch=switch
    )


@pytest.mark.parametrize("name", quick(ALWAYS, sorted(FAMILIES.keys() - {"paligemma"})))
def test_packed_batches_with_contents_have_the_logits_of_the_model_alone(name: str) -> None:
    model, traits = _model(name)

    assert isinstance(find_runner(name, model, traits), PackedRunner)


def test_bfloat16_is_compared_in_float32() -> None:
    model, traits = _model("gemma3", torch.bfloat16)

    assert isinstance(find_runner("gemma3", model, traits), PackedRunner)


def test_bidirectional_layers_of_the_runner() -> None:
    model, traits = _model("gemma4")

    layers = find_runner("gemma4", model, traits).layers

    assert [layer.spec.bidirectional for layer in layers] == [True, False, False]


def test_wrong_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, traits = _model("llava")
    encode = CapturingEncoder.encode

    def other_rows(self: CapturingEncoder, *arguments: Any) -> ContentEntry:
        entry = encode(self, *arguments)
        return replace(entry, rows=entry.rows.roll(1, 0))

    monkeypatch.setattr(CapturingEncoder, "encode", other_rows)

    with pytest.raises(ModelUnsupported, match="its logits differ"):
        find_runner("llava", model, traits)


def test_wrong_positions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, traits = _model("qwen2_vl")
    monkeypatch.setattr(CapturingEncoder, "layout", lambda *_: PromptLayout())

    with pytest.raises(ModelUnsupported, match="its logits differ"):
        find_runner("qwen2_vl", model, traits)


def test_wrong_ranges_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, traits = _model("gemma3")
    monkeypatch.setattr(CapturingEncoder, "layout", lambda *_: PromptLayout())

    with pytest.raises(ModelUnsupported, match="its logits differ"):
        find_runner("gemma3", model, traits)


def test_prefix_lm_is_refused() -> None:
    model, traits = _model("paligemma")

    with pytest.raises(ModelUnsupported, match="attend to later ones"):
        find_runner("paligemma", model, traits)
