"""Recurrent layers in the native step: outputs, and states in the cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from engine.native.decoder import DeltaRuleSpec, UnsupportedArchitecture
from engine.native.detection import find_decoder
from engine.native.runner import NativeRunner
from engine.run.runner import ModelRunner, runners_of
from engine.step.input import StepInput
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine.kit.tiny import VOCABULARY, settings
from tests.engine.native.decoders import CONTEXT, Steps, TinyModel, Weights, model_of_config, native, token
from tests.libraries import built
from tests.selection import quick

built("step")

# Fused and separate projections, experts, norms around both halves, max_beta 2.
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
# Gated short convolutions; with experts.
GATED_CONVOLUTIONS = ("lfm2", "lfm2_moe")
# Selective state spaces; with experts; in layers without an MLP; without attention.
STATE_SPACES = ("bamba", "granitemoehybrid", "nemotron_h", "mamba2")
MIXED: Steps = (((0, 9), (1, 30)), ((2, 17), (0, 1), (1, 3)), ((0, 1), (1, 1), (2, 1)), ((0, 40), (2, 1)))

pytestmark = pytest.mark.usefixtures("one_thread")


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((expected - actual).abs().max() / expected.abs().max())


def exact(model: TinyModel) -> Tensor:
    """Logits of all rows of MIXED by transformers in float64."""
    wide = copy.deepcopy(model.model).double()
    wide.set_attn_implementation("eager")
    wide.set_experts_implementation("eager")
    rows = {slot: sum(count for step in MIXED for own, count in step if own == slot) for slot in range(3)}
    with torch.inference_mode():
        outputs = [
            wide(torch.tensor([[token(slot, at) for at in range(rows[slot])]]), use_cache=False) for slot in rows
        ]
    return torch.cat([one.logits[0] for one in outputs])


def run_rows(
    runner: ModelRunner, cache: Cache, slot: int, rows: int, drafts: int = 0, kept: int | None = None
) -> Tensor:
    """Logits of a slot's next rows, of which the first `kept` stay."""
    span = Span(slot, cache.cached_length(slot), rows, draft_tokens=drafts)
    with cache.forward([span]) as forward:
        logits = runner.run(
            StepInput(forward, [token(0, at) for at in range(span.start, span.stop)], range(rows))
        ).logits
        forward.keep(slot, span.stop if kept is None else span.start + kept)
    return logits


@pytest.mark.parametrize(
    "family",
    quick(
        ("qwen3_next", "olmo_hybrid", "lfm2", "bamba", "nemotron_h", "mamba2"),
        [*DELTA, *GATED_CONVOLUTIONS, *STATE_SPACES],
    ),
)
def test_step_is_as_exact_as_the_modules(family: str) -> None:
    """Compared with float64, for chunks and single rows."""
    model = native(family)
    wide = exact(model)
    expected, actual = (relative_error(wide, model.states(runner, MIXED)[0]) for runner in (model.packed, model.runner))

    assert actual < max(2 * expected, 2e-5)
    assert actual < 1e-4


@pytest.mark.parametrize("weights", [32, 8])
def test_layers_with_one_half_and_experts_without_ups(weights: Weights) -> None:
    """The layers are the model's, so that hidden states after each of them can be read."""
    kinds = ["linear_attention", "moe", "full_attention", "mlp", "moe"]
    own = {
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
    }
    own = {
        name: value for name, value in {**settings("nemotron_h"), **own}.items() if name != "hybrid_override_pattern"
    }
    model = model_of_config(AutoConfig.for_model("nemotron_h", **own), weights)
    layers = find_decoder(model.model, model.packed.layers, vocabulary=VOCABULARY, context=CONTEXT).layers
    expected, actual = (model.states(runner, MIXED)[0] for runner in (model.packed, model.runner))

    assert isinstance(runners_of(model.runner)[0], NativeRunner)
    assert [True, False, True, False, False] == [layer.attention is not None for layer in layers]
    assert [False, True, False, True, True] == [layer.mlp is not None for layer in layers]
    assert {False} == {own.mlp.experts.activation.has_ups for own in layers if own.mlp and own.mlp.experts}
    # A code rounds the other way in some rows.
    assert relative_error(expected, actual) < (4e-5 if weights == 32 else 3e-2)


@pytest.mark.parametrize("own", [{"linear_allow_neg_eigval": True}, {"linear_allow_neg_eigval": False}])
def test_max_beta_is_found(own: dict[str, bool]) -> None:
    model = model_of_config(AutoConfig.for_model("olmo_hybrid", **{**settings("olmo_hybrid"), **own}))
    decoder = find_decoder(model.model, model.packed.layers, vocabulary=VOCABULARY, context=CONTEXT)
    mixers = [layer.attention.mixer for layer in decoder.layers]

    found = [mixer.max_beta for mixer in mixers if isinstance(mixer, DeltaRuleSpec)]

    assert {2.0 if own["linear_allow_neg_eigval"] else 1.0} == set(found)


def test_column_ranges_are_found() -> None:
    """In one fused matrix by head, or in several matrices."""
    fused, split = (
        find_decoder(native(name).model, native(name).packed.layers, vocabulary=VOCABULARY, context=CONTEXT)
        for name in ("qwen3_next", "qwen3_5_text")
    )
    first, other = fused.layers[0].attention.mixer, split.layers[0].attention.mixer

    assert isinstance(first, DeltaRuleSpec)
    assert isinstance(other, DeltaRuleSpec)
    # Two key heads: queries, keys, values and gates in one matrix, decay and beta inputs in another.
    assert (2, 12) == (len(first.projections), len(first.column_ranges))
    assert [0, 3, 2, 1] == [run.matrix for run in other.column_ranges]
    assert [None, None, None] != [getattr(layer.attention.mixer, "gates", None) for layer in split.layers]


def test_ambiguous_columns_follow_their_neighbours() -> None:
    """Equal betas match several columns."""
    model = native("qwen3_5_text")
    mixer = model.model.model.layers[0].linear_attn
    before = mixer.in_proj_b.weight.clone()
    mixer.in_proj_b.weight[1:3] = 0
    try:
        decoder = find_decoder(model.model, model.packed.layers, vocabulary=VOCABULARY, context=CONTEXT)
    finally:
        mixer.in_proj_b.weight.copy_(before)
    mixer = decoder.layers[0].attention.mixer

    assert isinstance(mixer, DeltaRuleSpec)
    assert [0, 3, 2, 1] == [run.matrix for run in mixer.column_ranges]


@pytest.mark.parametrize("kept", [1, 2, 4])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "lfm2", "bamba"])
def test_state_after_rejected_drafts(family: str, kept: int) -> None:
    """It has the bits of single rows, however many of three drafts are accepted."""
    model = native(family)
    guessing, plain = model.cache(model.runner), model.cache(model.runner)
    for cache in (guessing, plain):
        run_rows(model.runner, cache, 0, 11)
    with_guesses = run_rows(model.runner, guessing, 0, 4, drafts=3, kept=kept)
    alone = torch.cat([run_rows(model.runner, plain, 0, 1) for _ in range(kept)])

    assert torch.equal(alone, with_guesses[:kept])
    assert torch.equal(run_rows(model.runner, plain, 0, 5), run_rows(model.runner, guessing, 0, 5))


def test_copied_prefixes_share_their_state() -> None:
    model = native("qwen3_next")
    cache = model.cache(model.runner)
    run_rows(model.runner, cache, 0, 20)
    assert 20 == cache.copy_prefix(0, 1, 20)
    first = run_rows(model.runner, cache, 0, 3)

    assert torch.equal(first, run_rows(model.runner, cache, 1, 3))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "bamba"])
def test_modules_and_step_continue_from_the_same_states(family: str, order: Sequence[int]) -> None:
    model = native(family)
    runners = (model.packed, model.runner)
    mixed, alone = model.cache(model.packed), model.cache(model.packed)
    run_rows(runners[order[0]], mixed, 0, 13)
    run_rows(model.packed, alone, 0, 13)

    for rows in (1, 7):
        expected, actual = run_rows(model.packed, alone, 0, rows), run_rows(runners[order[1]], mixed, 0, rows)
        assert relative_error(expected, actual) < 1e-4


def test_convolutions_with_biases() -> None:
    model = model_of_config(AutoConfig.for_model("lfm2", **{**settings("lfm2"), "conv_bias": True}))
    expected, actual = (model.states(runner, MIXED)[0] for runner in (model.packed, model.runner))

    assert model.runner is not model.packed
    assert relative_error(expected, actual) < 2e-5


@pytest.mark.parametrize("groups", [1, 2])
def test_groups_of_state_space_heads(groups: int) -> None:
    """With states wider than a vector."""
    own = {"mamba_n_groups": groups, "mamba_d_state": 20, "mamba_d_head": 16, "mamba_n_heads": 8}
    model = model_of_config(AutoConfig.for_model("bamba", **{**settings("bamba"), **own}))
    expected, actual = (model.states(runner, MIXED)[0] for runner in (model.packed, model.runner))

    assert model.runner is not model.packed
    assert relative_error(expected, actual) < 2e-5


def test_recurrent_models_have_no_draft_loop() -> None:
    """Recurrent states cannot be rewound to rejected drafts."""
    for family, chained in (("qwen3_next", False), ("llama", True)):
        model = native(family)
        assert isinstance(runners_of(model.runner)[0], NativeRunner)
        assert chained == model.runner.supports_draft_loop(model.cache(model.runner).forward([Span(0, 0, 2)]))


def test_other_recurrences_are_unsupported() -> None:
    model = model_of_config(AutoConfig.for_model("jamba", **settings("jamba")))

    assert model.runner is model.packed
    with pytest.raises(UnsupportedArchitecture):
        find_decoder(model.model, model.packed.layers, vocabulary=VOCABULARY, context=CONTEXT)
