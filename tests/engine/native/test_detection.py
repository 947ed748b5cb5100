"""What the parts of a decoder are is found by computing them anew: norms, turns, activations, and who has no shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.native.decoder import UnsupportedArchitecture
from engine.native.detection import find_decoder
from engine.native.norm import find_norm, normalise
from engine.native.trace import TracedNorm
from tests.engine.native.decoders import CONTEXT, both, of_config
from tests.engine.tiny import VOCABULARY, settings


class Doubled(LlamaRMSNorm):  # type: ignore[misc]
    """No norm that is known."""

    def forward(self, rows: Tensor) -> Tensor:
        """Twice as large."""
        made: Tensor = 2 * super().forward(rows)
        return made


def seen(norm: nn.Module) -> TracedNorm:
    """A norm whose weights are random, called with some rows of different sizes."""
    torch.manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    rows = torch.randn(5, 24) * torch.logspace(-3, 2, 5)[:, None]
    with torch.inference_mode():
        made = norm(rows)
    return TracedNorm(find_norm(norm, rows, made), rows, made)


@pytest.mark.parametrize("epsilon", [1e-5, 1e-6])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm, nn.LayerNorm])
def test_norms_are_known_by_what_they_compute(kind: type[nn.Module], epsilon: float) -> None:
    """Weights around 0 and around 1, with and without a mean; rows near zero show epsilon."""
    module = kind(24, eps=epsilon)
    event = seen(module)
    small = 1e-3 * event.input

    assert epsilon == event.norm.epsilon
    with torch.inference_mode():
        torch.testing.assert_close(normalise(event.norm, small), module(small))


def test_another_norm_is_none() -> None:
    """What computes something else has no place in a native step."""
    with pytest.raises(UnsupportedArchitecture, match="Doubled"):
        seen(Doubled(24))


def test_a_decoder_is_described_by_its_parts() -> None:
    """Heads, turned columns, activations and the order of both halves, as the family's own code has them."""
    neox, glm, phi3 = (
        find_decoder(both(name).model, both(name).plain.layers, vocabulary=VOCABULARY, context=CONTEXT)
        for name in ("gpt_neox", "glm", "phi3")
    )
    attention, mlp = neox.layers[0]
    assert (48, 16) == (attention.mixer.queries.stride, attention.mixer.keys.offset)
    assert mlp.gated is not None
    assert (True, "gelu", None) == (mlp.parallel, mlp.gated.activation, mlp.gated.up)
    assert "interleaved" == glm.layers[0][0].mixer.rotary.rotation.layout
    assert 1 == len(phi3.layers[0][0].mixer.projections)


@pytest.mark.parametrize(
    ("family", "reason"),
    [("nanochat", "down matrix"), ("gpt2", "Conv1D"), ("apertus", "XIELU"), ("beam", "output projection")],
)
def test_the_reason_is_said(family: str, reason: str) -> None:
    """Start-up may say why a model runs as transformers wrote it."""
    model = both(family)

    with pytest.raises(UnsupportedArchitecture, match=reason):
        find_decoder(model.model, model.plain.layers, vocabulary=VOCABULARY, context=CONTEXT)


def test_what_a_model_multiplies_by_is_found() -> None:
    """Embeddings, what both halves add, scores and logits, each by its own number."""
    own = {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.4, "logits_scaling": 5.0}
    model = of_config(AutoConfig.for_model("granite", **{**settings("granite"), **own}))
    decoder = find_decoder(model.model, model.plain.layers, vocabulary=VOCABULARY, context=CONTEXT)
    attention, mlp = decoder.layers[1]

    assert pytest.approx((3.0, 0.3, 0.3, 0.2)) == (
        decoder.scale,
        attention.residual_scale,
        mlp.residual_scale,
        decoder.output_head.scale,
    )
    assert 0.4 == attention.mixer.scale


def test_what_bounds_scores_and_logits_is_found() -> None:
    """However small logits are: bounds show when the output layer speaks louder."""
    decoder = find_decoder(both("gemma2").model, both("gemma2").plain.layers, vocabulary=VOCABULARY, context=CONTEXT)

    assert (50.0, 30.0) == (decoder.layers[0][0].mixer.softcap, decoder.output_head.softcap)


def test_how_experts_are_chosen_is_found() -> None:
    """Corrections count where experts are chosen alone, weights have a sum, and a factor."""
    own = {"routed_scaling_factor": 2.5, "norm_topk_prob": True}
    model = of_config(AutoConfig.for_model("glm4_moe", **{**settings("glm4_moe"), **own}))
    decoder = find_decoder(model.model, model.plain.layers, vocabulary=VOCABULARY, context=CONTEXT)
    before, experts = decoder.layers[0][1].experts, decoder.layers[1][1].experts

    assert before is None
    assert experts is not None
    assert ("sigmoid", 2, True) == (experts.router.scoring, experts.router.top_k, experts.router.normalised)
    assert pytest.approx(2.5) == experts.router.scaling_factor


def test_experts_in_groups_have_no_shape() -> None:
    """A router is asked with many rows: what it does with few of them shows."""
    own = {"n_group": 2, "topk_group": 1}
    model = of_config(AutoConfig.for_model("glm4_moe", **{**settings("glm4_moe"), **own}))

    with pytest.raises(UnsupportedArchitecture, match="experts are chosen"):
        find_decoder(model.model, model.plain.layers, vocabulary=VOCABULARY, context=CONTEXT)


def test_layers_that_change_their_states_have_no_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the model that the shape does not have shows in what the next part takes."""
    model = both("llama")
    layer = model.model.model.layers[1]
    monkeypatch.setattr(layer, "forward", lambda *args, **named: type(layer).forward(layer, *args, **named).square())

    with pytest.raises(UnsupportedArchitecture, match="is not the output"):
        find_decoder(model.model, model.plain.layers, vocabulary=VOCABULARY, context=CONTEXT)
