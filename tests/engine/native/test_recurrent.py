"""Layers with states of their own in the native step: what they compute, and what they leave behind for whom."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from engine.model.model_runner import ModelRunner
from engine.native.decoder import DeltaRuleSpec, UnsupportedArchitecture
from engine.native.detection import find_decoder
from engine.native.runner import NativeRunner
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine.native.decoders import CONTEXT, Both, Steps, native, of_config, token
from tests.engine.tiny import VOCABULARY, settings
from tests.libraries import built

built("step")

# Projections all in one, and each by itself; experts; norms around both halves, and rates up to 2.
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
# Convolutions between two products; with experts.
SIEVES = ("lfm2", "lfm2_moe")
# State spaces whose numbers are chosen by each token; with experts.
SPACES = ("bamba", "granitemoehybrid")
MIXED: Steps = (((0, 9), (1, 30)), ((2, 17), (0, 1), (1, 3)), ((0, 1), (1, 1), (2, 1)), ((0, 40), (2, 1)))

pytestmark = pytest.mark.usefixtures("one_thread")


def apart(expected: Tensor, actual: Tensor) -> float:
    """The greatest difference, in parts of the largest number."""
    return float((expected - actual).abs().max() / expected.abs().max())


def exact(model: Both) -> Tensor:
    """Logits of all rows of MIXED as transformers alone computes them in float64."""
    wide = copy.deepcopy(model.model).double()
    wide.set_attn_implementation("eager")
    wide.set_experts_implementation("eager")
    rows = {slot: sum(count for step in MIXED for own, count in step if own == slot) for slot in range(3)}
    with torch.inference_mode():
        told = [wide(torch.tensor([[token(slot, at) for at in range(rows[slot])]]), use_cache=False) for slot in rows]
    return torch.cat([one.logits[0] for one in told])


def fed(runner: ModelRunner, cache: Cache, slot: int, rows: int, guessed: int = 0, kept: int | None = None) -> Tensor:
    """Logits of a slot's next rows, of which the first `kept` stay."""
    span = Span(slot, cache.cached_length(slot), rows, draft_tokens=guessed)
    with cache.forward([span]) as forward:
        logits = runner.run(forward, [token(0, at) for at in range(span.start, span.stop)], range(rows))
        forward.keep(slot, span.stop if kept is None else span.start + kept)
    return logits


@pytest.mark.parametrize("family", [*DELTA, *SIEVES, *SPACES])
def test_the_step_is_as_exact_as_the_modules(family: str) -> None:
    """Logits of chunks and single rows, beside those of float64: no farther off than the modules' own roundings."""
    model = native(family)
    wide = exact(model)
    expected, actual = (apart(wide, model.states(runner, MIXED)[0]) for runner in (model.plain, model.fastest))

    assert actual < max(2 * expected, 2e-5)
    assert actual < 1e-4


@pytest.mark.parametrize("own", [{"linear_allow_neg_eigval": True}, {"linear_allow_neg_eigval": False}])
def test_how_large_rates_may_be_is_found(own: dict[str, bool]) -> None:
    """Twice a sigmoid where states may change their sign."""
    model = of_config(AutoConfig.for_model("olmo_hybrid", **{**settings("olmo_hybrid"), **own}))
    decoder = find_decoder(model.model, model.plain.layers, vocabulary=VOCABULARY, context=CONTEXT)
    ways = [attention.mixer for attention, _ in decoder.layers]

    found = [way.max_beta for way in ways if isinstance(way, DeltaRuleSpec)]

    assert {2.0 if own["linear_allow_neg_eigval"] else 1.0} == set(found)


def test_parts_are_found_wherever_they_lie() -> None:
    """Heads side by side in one matrix, or a matrix for each part: runs of columns bring them to one order."""
    fused, split = (
        find_decoder(native(name).model, native(name).plain.layers, vocabulary=VOCABULARY, context=CONTEXT)
        for name in ("qwen3_next", "qwen3_5_text")
    )
    first, other = fused.layers[0][0].mixer, split.layers[0][0].mixer

    assert isinstance(first, DeltaRuleSpec)
    assert isinstance(other, DeltaRuleSpec)
    # Two key heads: queries, keys, values and gates in one matrix, what makes decays and rates in another.
    assert (2, 12) == (len(first.projections), len(first.column_ranges))
    assert [0, 3, 2, 1] == [run.matrix for run in other.column_ranges]
    assert [None, None, None] != [getattr(way.mixer, "gates", None) for way, _ in split.layers]


def test_columns_that_say_the_same_are_told_apart_by_their_neighbours() -> None:
    """Rates near 1 look alike: which columns make them follows from those beside them."""
    model = native("qwen3_5_text")
    mixer = model.model.model.layers[0].linear_attn
    before = mixer.in_proj_b.weight.clone()
    mixer.in_proj_b.weight[1:3] = 0
    try:
        decoder = find_decoder(model.model, model.plain.layers, vocabulary=VOCABULARY, context=CONTEXT)
    finally:
        mixer.in_proj_b.weight.copy_(before)
    way = decoder.layers[0][0].mixer

    assert isinstance(way, DeltaRuleSpec)
    assert [0, 3, 2, 1] == [run.matrix for run in way.column_ranges]


@pytest.mark.parametrize("kept", [1, 2, 4])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "lfm2", "bamba"])
def test_what_follows_guesses_is_what_follows_without(family: str, kept: int) -> None:
    """However many of three guesses stay, the state behind them is that of rows taken one by one, bit for bit."""
    model = native(family)
    guessing, plain = model.cache(model.fastest), model.cache(model.fastest)
    for cache in (guessing, plain):
        fed(model.fastest, cache, 0, 11)
    with_guesses = fed(model.fastest, guessing, 0, 4, guessed=3, kept=kept)
    alone = torch.cat([fed(model.fastest, plain, 0, 1) for _ in range(kept)])

    assert torch.equal(alone, with_guesses[:kept])
    assert torch.equal(fed(model.fastest, plain, 0, 5), fed(model.fastest, guessing, 0, 5))


def test_copies_go_on_from_the_same_states() -> None:
    """Two slots share a prefix and its state; neither changes it for the other."""
    model = native("qwen3_next")
    cache = model.cache(model.fastest)
    fed(model.fastest, cache, 0, 20)
    assert 20 == cache.copy_prefix(0, 1, 20)
    first = fed(model.fastest, cache, 0, 3)

    assert torch.equal(first, fed(model.fastest, cache, 1, 3))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "bamba"])
def test_modules_and_step_go_on_from_each_others_states(family: str, order: Sequence[int]) -> None:
    """Where the step cannot run, the modules do, and the other way around: the states are the same ones."""
    model = native(family)
    runners = (model.plain, model.fastest)
    mixed, alone = model.cache(model.plain), model.cache(model.plain)
    fed(runners[order[0]], mixed, 0, 13)
    fed(model.plain, alone, 0, 13)

    for rows in (1, 7):
        expected, actual = fed(model.plain, alone, 0, rows), fed(runners[order[1]], mixed, 0, rows)
        assert apart(expected, actual) < 1e-4


def test_convolutions_may_have_biases() -> None:
    """And so may the matrices around them."""
    model = of_config(AutoConfig.for_model("lfm2", **{**settings("lfm2"), "conv_bias": True}))
    expected, actual = (model.states(runner, MIXED)[0] for runner in (model.plain, model.fastest))

    assert model.fastest is not model.plain
    assert apart(expected, actual) < 2e-5


@pytest.mark.parametrize("groups", [1, 2])
def test_heads_share_keys_and_norms_in_groups(groups: int) -> None:
    """Of state spaces, as many as the model has; some state is wider than what the processor takes at a time."""
    own = {"mamba_n_groups": groups, "mamba_d_state": 20, "mamba_d_head": 16, "mamba_n_heads": 8}
    model = of_config(AutoConfig.for_model("bamba", **{**settings("bamba"), **own}))
    expected, actual = (model.states(runner, MIXED)[0] for runner in (model.plain, model.fastest))

    assert model.fastest is not model.plain
    assert apart(expected, actual) < 2e-5


def test_states_are_not_chained() -> None:
    """Steps that follow each other in one call take back cells alone: who has states is asked for one at a time."""
    for family, chained in (("qwen3_next", False), ("llama", True)):
        model = native(family)
        assert isinstance(model.fastest, NativeRunner)
        assert chained == model.fastest.supports_draft_loop(model.cache(model.fastest).forward([Span(0, 0, 2)]))


@pytest.mark.parametrize("family", ["mamba2", "jamba"])
def test_other_recurrences_run_as_they_are(family: str) -> None:
    """What is no gated delta rule has no shape, or stores no cells at all."""
    model = of_config(AutoConfig.for_model(family, **settings(family)))

    assert model.fastest is model.plain
    with pytest.raises(UnsupportedArchitecture):
        find_decoder(model.model, model.plain.layers, vocabulary=VOCABULARY, context=CONTEXT)
