"""What the parts of a decoder are is found by computing them anew: norms, turns, activations, and who has no shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.native.decoder import NoShape
from engine.native.norm import find_norm, normalise
from engine.native.shape import find_decoder
from engine.native.trace import Normed
from tests.engine.native.decoders import CONTEXT, both
from tests.engine.tiny import VOCABULARY


class Doubled(LlamaRMSNorm):  # type: ignore[misc]
    """No norm that is known."""

    def forward(self, rows: Tensor) -> Tensor:
        """Twice as large."""
        made: Tensor = 2 * super().forward(rows)
        return made


def seen(norm: nn.Module) -> Normed:
    """A norm whose weights are random, called with some rows of different sizes."""
    torch.manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    rows = torch.randn(5, 24) * torch.logspace(-3, 2, 5)[:, None]
    with torch.inference_mode():
        return Normed(norm, rows, norm(rows))


@pytest.mark.parametrize("epsilon", [1e-5, 1e-6])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm, nn.LayerNorm])
def test_norms_are_known_by_what_they_compute(kind: type[nn.Module], epsilon: float) -> None:
    """Weights around 0 and around 1, with and without a mean; rows near zero show epsilon."""
    event = seen(kind(24, eps=epsilon))
    norm = find_norm(event)
    small = 1e-3 * event.taken

    assert epsilon == norm.epsilon
    with torch.inference_mode():
        torch.testing.assert_close(normalise(norm, small), event.norm(small))


def test_another_norm_is_none() -> None:
    """What computes something else has no place in a native step."""
    with pytest.raises(NoShape, match="Doubled"):
        find_norm(seen(Doubled(24)))


def test_a_decoder_is_described_by_its_parts() -> None:
    """Heads, turned columns, activations and the order of both halves, as the family's own code has them."""
    neox, glm, phi3 = (
        find_decoder(both(name).model, both(name).plain.layers, vocabulary=VOCABULARY, context=CONTEXT)
        for name in ("gpt_neox", "glm", "phi3")
    )
    attention, mlp = neox.layers[0]
    assert (48, 16) == (attention.way.queries.stride, attention.way.keys.offset)
    assert (True, "gelu", None) == (mlp.parallel, mlp.activation, mlp.up)
    assert "interleaved" == glm.layers[0][0].way.turn.rotation.layout
    assert 1 == len(phi3.layers[0][0].way.projections)


@pytest.mark.parametrize(
    ("family", "reason"),
    [("gpt_oss", "Attention"), ("gemma2", "one norm"), ("mixtral", "layers"), ("gpt2", "one norm")],
)
def test_the_reason_is_said(family: str, reason: str) -> None:
    """Start-up may say why a model runs as transformers wrote it."""
    model = both(family)

    with pytest.raises(NoShape, match=reason):
        find_decoder(model.model, model.plain.layers, vocabulary=VOCABULARY, context=CONTEXT)


def test_layers_that_scale_what_they_add_have_no_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the model that the shape does not have shows in what the next part takes."""
    model = both("granite").model
    for layer in model.model.layers:
        monkeypatch.setattr(layer, "residual_multiplier", 0.5)

    with pytest.raises(NoShape, match="takes something else"):
        find_decoder(model, both("granite").plain.layers, vocabulary=VOCABULARY, context=CONTEXT)
