"""A native step with other logits than the modules is refused at load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import AutoConfig

from engine.load.check import selection as choosing
from engine.native.decoder import DecoderSpec
from tests.engine.kit.tiny import settings
from tests.engine.native.decoders import Weights, model_of_config
from tests.libraries import built

built("step")

pytestmark = pytest.mark.usefixtures("one_thread")

Wrong = Callable[[DecoderSpec], DecoderSpec]


@pytest.mark.parametrize("weights", [32, 8, 4])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda decoder: replace(decoder, layers=decoder.layers[::-1]),
        lambda decoder: replace(decoder, layers=(*decoder.layers[:-1], decoder.layers[0])),
        lambda decoder: replace(decoder, scale=1.5),
    ],
    ids=["layers in another order", "a layer twice", "embeddings too large"],
)
def test_misplaced_layer_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: Wrong, weights: Weights
) -> None:
    """With quantised weights too; the log has the difference of the logits."""
    find = choosing.find_decoder
    monkeypatch.setattr(choosing, "find_decoder", lambda *given, **more: wrong(find(*given, **more)))
    model = model_of_config(AutoConfig.for_model("qwen3", **settings("qwen3")), weights)

    assert model.runner is model.packed
    assert "the native step changes logits by" in caplog.text
