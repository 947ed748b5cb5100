"""The native step says what transformers' modules say, and of each row the same bit for bit whoever is beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from engine.kernels.cpu import build
from engine.native.decoder import DecoderSpec
from engine.native.detection import find_decoder
from engine.native.float32_mode import Float32Mode
from engine.native.runner import NativeRunner
from engine.native.step_library import StepLibrary
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine.native.decoders import CONTEXT, Both, Steps, Weights, both, native, of_config, token
from tests.engine.tiny import VOCABULARY, settings
from tests.libraries import built

built("step")

# Biases, norms of heads, windows, matrices in one, halves and pairs that turn, layers that do not, gates and none.
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "phi", "phi3", "gpt_neox", "gemma", "glm", "smollm3", "starcoder2"),
    *("nemotron", "stablelm", "arcee"),
    # Norms behind both halves, norms of all heads at once, norms without weights, scores and logits within bounds,
    # sinks, logits that are scaled, norms of heads between other parts.
    *("olmo2", "olmo", "gemma2", "gemma3_text", "glm4", "granite_swa", "cohere", "exaone4", "persimmon", "vaultgemma"),
)
# Experts: softmax and sigmoid, corrected choices, weights of any sum, beside matrices for all rows, gated and not.
# Matrices to the right of rows, biases, gates that alternate with what they are multiplied by.
EXPERTS = (
    *("mixtral", "qwen2_moe", "glm4_moe", "granitemoe", "minimax_m2", "flex_olmo", "cohere2_moe"),
    *("aria_text", "gpt_oss"),
)
OTHERS = ("gpt2", "jetmoe", "phimoe")
MIXED: Steps = (((0, 9), (1, 30)), ((2, 17), (0, 1), (1, 3)), ((0, 1), (1, 1), (2, 1)), ((0, 40), (2, 1)))


pytestmark = pytest.mark.usefixtures("one_thread")


def apart(expected: Tensor, actual: Tensor) -> float:
    """The greatest difference, in parts of the largest number."""
    return float((expected - actual).abs().max() / expected.abs().max())


def decoder_of(model: Both) -> DecoderSpec:
    """A model's parts."""
    with Float32Mode(model.model):
        return find_decoder(model.model, model.plain.layers, vocabulary=VOCABULARY, context=CONTEXT)


def unrounded(model: Both) -> NativeRunner:
    """What runs it with no row rounded, whatever the processor would like."""
    library = StepLibrary(build.library("step", build.variants("step")[0]))
    return NativeRunner(model.plain, decoder_of(model), library, rounds_to_bfloat16=False)


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERTS])
def test_the_step_says_what_the_modules_say(family: str) -> None:
    """Logits and states of chunks and single rows, within rounding of float32."""
    model = native(family)
    expected, actual = (model.states(runner, MIXED) for runner in (model.plain, model.fastest))

    assert apart(expected[0], actual[0]) < 2e-5
    assert apart(expected[1], actual[1]) < 2e-5


def test_what_halves_add_is_multiplied() -> None:
    """Embeddings, what both halves add, scores and logits, each by its own number."""
    own = {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.4, "logits_scaling": 5.0}
    model = of_config(AutoConfig.for_model("granite", **{**settings("granite"), **own}))
    expected, actual = (model.states(runner, MIXED) for runner in (model.plain, model.fastest))

    assert isinstance(model.fastest, NativeRunner)
    assert apart(expected[0], actual[0]) < 1e-5


@pytest.mark.parametrize(("limit", "slope"), [(0.3, 1.3), (7.0, 1.702)])
def test_gates_of_experts_are_bounded(limit: float, slope: float) -> None:
    """What bounds gates, and what they are multiplied by before the sigmoid, are the model's own numbers."""
    own = {"swiglu_limit": limit, "swiglu_alpha": slope}
    model = of_config(AutoConfig.for_model("gpt_oss", **{**settings("gpt_oss"), **own}))
    expected, actual = (model.states(runner, MIXED) for runner in (model.plain, model.fastest))
    [gate] = {mlp.experts.activation for _, mlp in decoder_of(model).layers if mlp.experts is not None}

    assert isinstance(model.fastest, NativeRunner)
    assert (limit, slope, 1.0, True) == (gate.limit, gate.slope, gate.shift, gate.interleaved)
    assert apart(expected[0], actual[0]) < 2e-5


@pytest.mark.parametrize("weights", [8, 4])
@pytest.mark.parametrize("family", ["gpt_oss", "cohere2_moe"])
def test_quantised_experts_are_the_modules(family: str, weights: Weights) -> None:
    """Most rows say the same within rounding; in some a code falls the other way, or a router has another choice."""
    model = native(family, weights)
    expected, actual = (model.states(runner, MIXED)[0] for runner in (model.plain, model.fastest))
    sizes = (expected - actual).abs().amax(1) / expected.abs().max()

    assert all(isinstance(mlp.experts.inner.weight, tuple) for _, mlp in decoder_of(model).layers if mlp.experts)
    assert float(sizes.quantile(0.75)) < 1e-5
    assert float(sizes.max()) < 0.1


@pytest.mark.parametrize(
    ("family", "weights"), [("llama", 32), ("llama", 16), ("llama", 8), ("gpt_oss", 32), ("gpt_oss", 8), ("gpt_oss", 4)]
)
def test_odd_sizes_are_computed_to_the_end(family: str, weights: Weights) -> None:
    """No size is a multiple of what the processor takes at a time."""
    # torch's product of experts wants rows of whole 16 bytes.
    width = 101 if family == "llama" else 100
    odd = {"hidden_size": 68, "intermediate_size": width, "head_dim": 10, "vocab_size": VOCABULARY + 3}
    model = of_config(AutoConfig.for_model(family, **{**settings(family), **odd}), weights)
    with Float32Mode(model.model):
        expected, actual = (model.states(runner, MIXED) for runner in (model.plain, model.fastest))

    assert isinstance(model.fastest, NativeRunner)
    assert apart(expected[0], actual[0]) < (1e-5 if weights == 32 else 5e-2)


@pytest.mark.parametrize("weights", [32, 16, 8, 4])
@pytest.mark.parametrize(
    "family",
    ["llama", "gpt_neox", "mistral", "qwen2_moe", "gpt_oss", "qwen3_next", "qwen3_5_text", "lfm2", "bamba"],
)
def test_neither_neighbours_nor_chunks_change_a_bit(family: str, weights: Weights) -> None:
    """One row at a time alone, beside seven others, or in chunks of any size: the same numbers to the last bit."""
    model, length = native(family, weights), 21
    alone = [((slot, 1),) for slot in range(8) for _ in range(length)]
    batch = [[(slot, 1) for slot in range(8)] for _ in range(length)]
    chunks = [((slot, rows),) for slot in range(8) for rows in (7, 1, 13)]
    expected, _ = model.states(model.fastest, alone)

    assert torch.equal(expected, model.states(model.fastest, batch)[0])
    assert torch.equal(expected, model.states(model.fastest, chunks)[0])


@pytest.mark.parametrize("weights", [32, 16])
def test_no_number_of_rows_changes_a_bit(weights: Weights) -> None:
    """Few rows meet weights in another order than many, which come in tiles: every row is what it is alone."""
    odd = {"hidden_size": 68, "intermediate_size": 101, "head_dim": 10, "vocab_size": VOCABULARY + 3}
    model = of_config(AutoConfig.for_model("llama", **{**settings("llama"), **odd}), weights)
    counts = range(1, 15)
    alone, _ = model.states(model.fastest, [((0, 1),)] * sum(counts))

    assert torch.equal(alone, model.states(model.fastest, [((0, count),) for count in counts])[0])


@pytest.mark.parametrize("weights", [32, 16, 8, 4])
def test_rows_that_fill_the_cache_are_what_they_are_alone(weights: Weights) -> None:
    """Layers so wide that a processor's cache does not hold all rows: no bit tells how many are met at a time."""
    model = of_config(AutoConfig.for_model("llama", **(settings("llama") | {"intermediate_size": 32768})), weights)
    together, _ = model.states(model.fastest, (((0, 120),),))

    assert isinstance(model.fastest, NativeRunner)
    assert torch.equal(together, model.states(model.fastest, (((0, 41),), ((0, 1),), ((0, 2),), ((0, 76),)))[0])


@pytest.mark.parametrize(
    ("family", "weights"),
    [
        ("llama", 32),
        ("llama", 16),
        ("llama", 8),
        ("glm4_moe", 16),
        ("gpt_oss", 8),
        ("gpt_oss", 4),
        ("qwen3_next", 32),
        ("bamba", 16),
    ],
)
def test_threads_change_no_bit(family: str, weights: Weights) -> None:
    """The same with one thread, two and three, of rows beside others and of a row alone."""
    model, steps = native(family, weights), (*MIXED, ((0, 1),), ((1, 1),))
    expected, _ = model.states(model.fastest, steps)

    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(expected, model.states(model.fastest, steps)[0])


@pytest.mark.parametrize("weights", [8, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "qwen3_5_text"])
def test_quantised_matrices_are_the_modules(family: str, weights: Weights) -> None:
    """Rows are rounded as the modules round them, so logits are those of the output layer but for its sums."""
    model = native(family, weights)
    expected, _ = model.states(model.plain, MIXED)
    logits, states = model.states(model.fastest, MIXED)
    head: nn.Module = model.model.get_output_embeddings()

    assert apart(head(states), logits) < 1e-6
    # A code in a thousand falls the other way.
    assert apart(expected, logits) < 3e-2


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "mixtral", "qwen3_next", "bamba"])
def test_weights_of_16_bits_are_computed_in_float32(family: str) -> None:
    """All but the weights is float32: what the modules say when their weights are widened, within rounding of that."""
    model = native(family, 16)
    with Float32Mode(model.model):
        expected, _ = model.states(model.plain, MIXED)
    logits, _ = model.states(unrounded(model), MIXED)

    assert torch.float32 == logits.dtype
    # Two orders of summation differ by up to 4.3e-5, as the processor is; 16 bits would differ a hundred times as much.
    assert apart(expected, logits) < 1e-4


# The others take long to build, and are built by who has such a processor.
SOME = [pytest.param(name, marks=[pytest.mark.slow] if at else []) for at, name in enumerate(build.variants("step"))]


@pytest.mark.parametrize("variant", SOME)
def test_rows_are_rounded_to_meet_weights_of_16_bits_in_pairs(variant: str) -> None:
    """Where the processor multiplies such pairs, and only there; sums are float32 then too."""
    model = native("llama", 16)
    runner = NativeRunner(model.plain, decoder_of(model), StepLibrary(build.library("step", variant)))
    logits, states = model.states(runner, MIXED)
    rows = states.bfloat16().float() if variant == "bfloat16" else states
    expected = rows @ model.model.get_output_embeddings().weight.float().T

    assert apart(expected, logits) < 1e-6


def test_weights_stay_where_the_modules_find_them() -> None:
    """The matrices are moved, not copied: tied ones stay tied, and both runners read the same memory."""
    model = native("gemma", 16).model

    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert {0} == {own.data_ptr() % 64 for own in model.parameters() if own.dim() > 1}


def test_cells_of_16_bits_hold_what_torch_would_store() -> None:
    """Keys and values are rounded to the nearest: both runners store the same but for what rounding decides."""
    model = native("qwen3")
    specs = [plan.spec for plan in model.plain.layers]
    planes = []
    for runner in (model.plain, model.fastest):
        some = Cache(specs, slots=1, capacity=32, cells=32, dtype=torch.bfloat16)
        with some.forward([Span(0, 0, 32)]) as forward:
            runner.run(forward, [token(0, at) for at in range(32)], [31])
            cells = forward.segments(0)[0].cells
            planes.append([stored.read(cells, torch.float32) for stored in forward.layer_kv(0)])

    for expected, actual in zip(*planes, strict=True):
        assert (expected != actual).float().mean() < 0.01
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-6)


def test_long_contexts_are_cut_among_threads() -> None:
    """Attention beyond one part of the cells, with several threads, is that of one."""
    model = native("llama")
    steps = (((0, CONTEXT - 3),), ((0, 1),), ((0, 2),))
    expected = model.states(model.fastest, steps)[0]
    torch.set_num_threads(4)

    assert torch.equal(expected, model.states(model.fastest, steps)[0])


@pytest.mark.parametrize(("family", "weights"), [("llama", 32), ("gpt_oss", 32), ("gpt_oss", 4)])
def test_a_row_that_is_not_finite_stays_alone(family: str, weights: Weights) -> None:
    """A token whose embedding is broken spoils the sequence that has it, and no other."""
    model, steps = native(family, weights), (((0, 5), (1, 5)), ((0, 1), (1, 1)))
    expected, _ = model.states(model.fastest, steps)
    weight = model.model.get_input_embeddings().weight
    before = weight[token(1, 0)].clone()
    weight[token(1, 0)] = torch.nan
    try:
        actual, _ = model.states(model.fastest, steps)
    finally:
        weight[token(1, 0)] = before

    assert torch.equal(expected[:6], actual[:6])
    assert actual[6:].isnan().all()


def test_rows_that_see_each_other_are_left_to_the_modules() -> None:
    """The native step knows no ranges of tokens that see those behind them."""
    model, told = native("llama"), []
    for runner in (model.plain, model.fastest):
        some = Cache([plan.spec for plan in runner.layers], slots=1, capacity=16, cells=16, dtype=torch.float32)
        with some.forward([Span(0, 0, 9, bidirectional=((2, 6),))]) as forward:
            told.append(runner.run(forward, list(range(9)), list(range(9))))

    assert torch.equal(*told)


def test_who_listens_to_the_modules_hears_them() -> None:
    """A hook on the decoder, such as a draft head's, gets its states: then the modules run."""
    model, heard = native("llama"), []
    handle = model.model.get_decoder().register_forward_hook(lambda module, taken, made: heard.append(made))
    try:
        model.states(model.fastest, (((0, 3),),))
    finally:
        handle.remove()

    assert 1 == len(heard)


@pytest.mark.parametrize("family", OTHERS)
def test_other_shapes_run_as_they_are(family: str) -> None:
    """What is not of the common shape is not forced into it."""
    assert not isinstance(both(family).fastest, NativeRunner)
