"""Decoder architectures are found by recomputing a trace."""

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
from tests.engine.kit.tiny import VOCABULARY, settings
from tests.engine.native.decoders import CONTEXT, model_of_config, tiny_model


class Doubled(LlamaRMSNorm):  # type: ignore[misc]
    """An unsupported norm."""

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = 2 * super().forward(rows)
        return output


def traced(norm: nn.Module) -> TracedNorm:
    """A call of a norm with random weights and rows of different sizes."""
    torch.manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    rows = torch.randn(5, 24) * torch.logspace(-3, 2, 5)[:, None]
    with torch.inference_mode():
        output = norm(rows)
    return TracedNorm(find_norm(norm, rows, output), rows, output)


@pytest.mark.parametrize("epsilon", [1e-5, 1e-6])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm, nn.LayerNorm])
def test_norms_are_found_by_their_output(kind: type[nn.Module], epsilon: float) -> None:
    """Weights around 0 and 1, with and without a mean; small rows depend on epsilon."""
    module = kind(24, eps=epsilon)
    event = traced(module)
    small = 1e-3 * event.input

    assert epsilon == event.norm.epsilon
    with torch.inference_mode():
        torch.testing.assert_close(normalise(event.norm, small), module(small))


def test_unsupported_norm_is_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match="Doubled"):
        traced(Doubled(24))


def test_layouts_of_heads_and_mlps_are_found() -> None:
    neox, glm, phi3 = (
        find_decoder(tiny_model(name).model, tiny_model(name).packed.layers, vocabulary=VOCABULARY, context=CONTEXT)
        for name in ("gpt_neox", "glm", "phi3")
    )
    attention, mlp = neox.layers[0].attention, neox.layers[0].mlp
    assert (48, 16) == (attention.mixer.queries.stride, attention.mixer.keys.offset)
    assert mlp.gated is not None
    assert (True, "gelu", None) == (mlp.parallel, mlp.gated.activation, mlp.gated.up)
    assert "interleaved" == glm.layers[0].attention.mixer.rotary.rotation.layout
    assert 1 == len(phi3.layers[0].attention.mixer.projections)


@pytest.mark.parametrize(
    ("family", "reason"),
    [("nanochat", "input of a layer"), ("gpt2", "Conv1D"), ("apertus", "XIELU"), ("beam", "output projection")],
)
def test_unsupported_models_have_a_reason(family: str, reason: str) -> None:
    model = tiny_model(family)

    with pytest.raises(UnsupportedArchitecture, match=reason):
        find_decoder(model.model, model.packed.layers, vocabulary=VOCABULARY, context=CONTEXT)


def test_multipliers_are_found() -> None:
    """Of embeddings, residuals, scores and logits."""
    own = {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.4, "logits_scaling": 5.0}
    model = model_of_config(AutoConfig.for_model("granite", **{**settings("granite"), **own}))
    decoder = find_decoder(model.model, model.packed.layers, vocabulary=VOCABULARY, context=CONTEXT)
    attention, mlp = decoder.layers[1].attention, decoder.layers[1].mlp

    assert pytest.approx((3.0, 0.3, 0.3, 0.2)) == (
        decoder.scale,
        attention.residual_scale,
        mlp.residual_scale,
        decoder.output_head.scale,
    )
    assert 0.4 == attention.mixer.scale


def test_softcaps_are_found() -> None:
    """Also for small logits, which are amplified in the trace."""
    decoder = find_decoder(
        tiny_model("gemma2").model, tiny_model("gemma2").packed.layers, vocabulary=VOCABULARY, context=CONTEXT
    )

    assert (50.0, 30.0) == (decoder.layers[0].attention.mixer.softcap, decoder.output_head.softcap)


def test_router_parameters_are_found() -> None:
    """Score correction, normalisation and scaling factor."""
    own = {"routed_scaling_factor": 2.5, "norm_topk_prob": True}
    model = model_of_config(AutoConfig.for_model("glm4_moe", **{**settings("glm4_moe"), **own}))
    decoder = find_decoder(model.model, model.packed.layers, vocabulary=VOCABULARY, context=CONTEXT)
    before, experts = decoder.layers[0].mlp.experts, decoder.layers[1].mlp.experts

    assert before is None
    assert experts is not None
    assert ("sigmoid", 2, True) == (experts.router.scoring, experts.router.top_k, experts.router.normalised)
    assert pytest.approx(2.5) == experts.router.scaling_factor


def test_experts_in_groups_are_unsupported() -> None:
    """Many rows are routed, because few of them may not show the groups."""
    own = {"n_group": 2, "topk_group": 1}
    model = model_of_config(AutoConfig.for_model("glm4_moe", **{**settings("glm4_moe"), **own}))

    with pytest.raises(UnsupportedArchitecture, match="experts are chosen"):
        find_decoder(model.model, model.packed.layers, vocabulary=VOCABULARY, context=CONTEXT)


def test_extra_operation_in_a_layer_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes the input of the next module."""
    model = tiny_model("llama")
    layer = model.model.model.layers[1]
    monkeypatch.setattr(layer, "forward", lambda *args, **named: type(layer).forward(layer, *args, **named).square())

    with pytest.raises(UnsupportedArchitecture, match="is not the output"):
        find_decoder(model.model, model.packed.layers, vocabulary=VOCABULARY, context=CONTEXT)
