"""The native step equals transformers' modules, and its bits do not depend on the batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

from engine.kernels.cpu.build import libraries
from engine.native.decoder import DecoderSpec, QueryScale
from engine.native.detection import find_decoder
from engine.native.float32_mode import Float32Mode
from engine.native.runner import NativeRunner
from engine.native.step_library import step_library
from engine.run.runner import runners_of
from engine.step.input import FINAL_NORM, HiddenRows, StepInput
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine.kit.tiny import VOCABULARY, settings
from tests.engine.native.decoders import CONTEXT, Steps, TinyModel, Weights, model_of_config, native, tiny_model, token
from tests.libraries import built
from tests.selection import quick

built("step")

# Biases, head norms, windows, fused matrices, both rotary layouts, layers without rotary embedding, plain MLPs.
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "phi", "phi3", "gpt_neox", "gemma", "glm", "smollm3", "starcoder2"),
    *("nemotron", "stablelm", "arcee"),
    # Norms after both halves, norms over all heads, norms without weights, softcaps, sinks, scaled logits.
    *("olmo2", "olmo", "gemma2", "gemma3_text", "glm4", "granite_swa", "cohere", "exaone4", "persimmon", "vaultgemma"),
    # Per-layer inputs, shared keys and values, norms of values.
    *("gemma4_text", "gemma4_unified_text"),
)
# Experts: softmax and sigmoid scores, score correction, weights that are not normalised, a dense MLP beside them with
# and without a gate, transposed matrices, biases, interleaved gates and ups, a router with a linear layer.
EXPERTS = (
    *("mixtral", "qwen2_moe", "glm4_moe", "granitemoe", "minimax_m2", "flex_olmo", "cohere2_moe"),
    *("aria_text", "gpt_oss", "deepseek_v2", "deepseek_v3", "hunyuan_v1_moe"),
)
OTHERS = ("gpt2", "jetmoe", "phimoe")
MIXED: Steps = (((0, 9), (1, 30)), ((2, 17), (0, 1), (1, 3)), ((0, 1), (1, 1), (2, 1)), ((0, 40), (2, 1)))


pytestmark = pytest.mark.usefixtures("one_thread")


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((expected - actual).abs().max() / expected.abs().max())


def decoder_of(model: TinyModel) -> DecoderSpec:
    """The decoder of a model."""
    with Float32Mode(model.model):
        return find_decoder(model.model, model.packed.layers, vocabulary=VOCABULARY, context=CONTEXT)


def unrounded(model: TinyModel) -> NativeRunner:
    """A native runner that rounds no row to bfloat16."""
    library = step_library()
    return NativeRunner(model.packed, decoder_of(model), library, rounds_to_bfloat16=False)


@pytest.mark.parametrize("family", quick([*FAMILIES, *EXPERTS][::2], [*FAMILIES, *EXPERTS]))
def test_step_equals_the_modules(family: str) -> None:
    """Logits and hidden states of chunks and single rows."""
    model = native(family)
    expected, actual = (model.states(runner, MIXED) for runner in (model.packed, model.runner))

    assert relative_error(expected[0], actual[0]) < 4e-5
    assert relative_error(expected[1], actual[1]) < 4e-5


def test_multipliers() -> None:
    """Of embeddings, residuals, scores and logits."""
    own = {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.4, "logits_scaling": 5.0}
    model = model_of_config(AutoConfig.for_model("granite", **{**settings("granite"), **own}))
    expected, actual = (model.states(runner, MIXED) for runner in (model.packed, model.runner))

    assert isinstance(runners_of(model.runner)[0], NativeRunner)
    assert relative_error(expected[0], actual[0]) < 1e-5


@pytest.mark.parametrize("family", ["ministral3", "mistral4"])
def test_queries_are_scaled_by_position(family: str) -> None:
    """With attention over keys and values, and over latents."""
    # transformers names this class only inside models of images.
    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 8}
    base = {**settings("deepseek_v3"), "head_dim": 24} if family == "mistral4" else settings(family)
    rope_parameters = {**rope, "llama_4_scaling_beta": 0.5}
    model = model_of_config(AutoConfig.for_model(family, **{**base, "rope_parameters": rope_parameters}))
    expected, actual = (model.states(runner, MIXED) for runner in (model.packed, model.runner))

    assert isinstance(runners_of(model.runner)[0], NativeRunner)
    scales = {layer.attention.mixer.rotary.query_scale for layer in decoder_of(model).layers}
    assert {QueryScale(0.5, 8)} == scales
    assert relative_error(expected[0], actual[0]) < 4e-5


@pytest.mark.parametrize(("limit", "slope"), [(0.3, 1.3), (7.0, 1.702)])
def test_limit_and_slope_of_expert_gates(limit: float, slope: float) -> None:
    own = {"swiglu_limit": limit, "swiglu_alpha": slope}
    model = model_of_config(AutoConfig.for_model("gpt_oss", **{**settings("gpt_oss"), **own}))
    expected, actual = (model.states(runner, MIXED) for runner in (model.packed, model.runner))
    [gate] = {layer.mlp.experts.activation for layer in decoder_of(model).layers if layer.mlp.experts is not None}

    assert isinstance(runners_of(model.runner)[0], NativeRunner)
    assert (limit, slope, 1.0, True) == (gate.limit, gate.slope, gate.shift, gate.interleaved)
    assert relative_error(expected[0], actual[0]) < 2e-5


@pytest.mark.parametrize("family", ["gemma4_text", "gemma4_unified_text"])
def test_layers_that_only_read_cells_are_computed_for_outputs(family: str) -> None:
    """With the bits of a step that has outputs of all rows; a step may have none."""
    model = native(family, 8)
    caches = [model.cache(model.runner) for _ in range(2)]
    for chunk, outputs in ((9, [8]), (20, []), (30, [4, 29, 4]), (1, [0]), (12, [11, 2])):
        tokens = [token(0, position) for position in range(chunk)]
        logits = []
        for cache, rows in zip(caches, (list(range(chunk)), outputs), strict=True):
            with cache.forward([Span(0, cache.cached_length(0), chunk)]) as forward:
                output = model.runner.run(StepInput(forward, tokens, rows, HiddenRows(rows)))
                logits.append((output.logits.clone(), output.hidden_states[FINAL_NORM].clone()))
        assert torch.equal(logits[0][0][outputs], logits[1][0])
        assert torch.equal(logits[0][1][outputs], logits[1][1])


def test_values_may_be_keys_before_their_norm() -> None:
    """As in the large models of Gemma 4, whose layers have no per-layer inputs."""
    own = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
    model = model_of_config(AutoConfig.for_model("gemma4_text", **{**settings("gemma4_text"), **own}))

    mixers = [layer.attention.mixer for layer in decoder_of(model).layers]
    assert any(mixer.stores and mixer.keys == mixer.values for mixer in mixers)
    expected, actual = (model.states(runner, MIXED) for runner in (model.packed, model.runner))
    assert relative_error(expected[0], actual[0]) < 2e-5


def gemma4_with_experts(weights: Weights = 32) -> TinyModel:
    """As Gemma 4 26B-A4B, whose experts read the hidden states and have norms and scales."""
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    layers = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    config = AutoConfig.for_model("gemma4_text", **{**settings("gemma4_text"), **layers, **experts})
    return model_of_config(config, weights)


def test_experts_next_to_a_dense_mlp_may_have_norms() -> None:
    """Chunks and single rows; the bits do not depend on them, nor on threads."""
    model = gemma4_with_experts()
    expected, actual = (model.states(runner, MIXED) for runner in (model.packed, model.runner))
    experts = [layer.mlp.experts for layer in decoder_of(model).layers]
    alone = model.states(model.runner, [((0, 1),)] * 21)[0]

    assert isinstance(runners_of(model.runner)[0], NativeRunner)
    assert all(layer.norms is not None and layer.router.expert_scales is not None for layer in experts)
    assert relative_error(expected[0], actual[0]) < 4e-5
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(alone, model.states(model.runner, [((0, 7),), ((0, 1),), ((0, 13),)])[0])


@pytest.mark.parametrize("weights", [32, 16])
def test_router_may_scale_the_inputs_of_experts(weights: Weights) -> None:
    """As in Llama 4, whose layers without rotary embedding scale their queries by position."""
    layers = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "num_experts_per_tok": 2, "num_local_experts": 4}
    scales = {"floor_scale": 8, "attn_scale": 0.5}
    config = AutoConfig.for_model("llama4_text", **{**settings("llama4_text"), **layers, **scales})
    model = model_of_config(config, weights)
    with Float32Mode(model.model):
        expected = model.states(model.packed, MIXED)[0]
    actual = model.states(unrounded(model), MIXED)[0]
    decoder = decoder_of(model)

    assert isinstance(runners_of(model.runner)[0], NativeRunner)
    assert all(layer.mlp.experts.scales_inputs for layer in decoder.layers)
    assert [None, None, None, QueryScale(0.5, 8, offset=1)] == [
        layer.attention.mixer.rotary.query_scale for layer in decoder.layers
    ]
    assert relative_error(expected, actual) < 1e-4


@pytest.mark.parametrize("weights", quick([8], [8, 4]))
def test_quantised_experts_with_norms_equal_the_modules(weights: Weights) -> None:
    """But for codes that round the other way."""
    model = gemma4_with_experts(weights)
    expected, actual = (model.states(runner, MIXED)[0] for runner in (model.packed, model.runner))
    sizes = (expected - actual).abs().amax(1) / expected.abs().max()

    assert isinstance(runners_of(model.runner)[0], NativeRunner)
    assert float(sizes.median()) < 1e-2
    assert float(sizes.max()) < 0.2


@pytest.mark.parametrize(
    ("family", "weights"),
    quick([("gpt_oss", 8), ("cohere2_moe", 4)], itertools.product(("gpt_oss", "cohere2_moe"), (8, 4))),
)
def test_quantised_experts_equal_the_modules(family: str, weights: Weights) -> None:
    """In some rows a code or the choice of an expert differs by rounding, and in rows that attend to them."""
    model = native(family, weights)
    expected, actual = (model.states(runner, MIXED)[0] for runner in (model.packed, model.runner))
    sizes = (expected - actual).abs().amax(1) / expected.abs().max()

    experts = [layer.mlp.experts for layer in decoder_of(model).layers if layer.mlp.experts is not None]
    assert all(isinstance(own.inner[0].weight, tuple) for own in experts)
    assert float(sizes.median()) < 1e-5
    assert float(sizes.max()) < 0.1


@pytest.mark.parametrize(
    ("family", "weights"), [("llama", 32), ("llama", 16), ("llama", 8), ("gpt_oss", 32), ("gpt_oss", 8), ("gpt_oss", 4)]
)
def test_sizes_that_are_no_multiples_of_vectors(family: str, weights: Weights) -> None:
    """In some rows of experts with 4 bits, another expert is chosen because of rounding."""
    # torch's product of experts needs rows in multiples of 16 bytes.
    width = 101 if family == "llama" else 100
    odd = {"hidden_size": 68, "intermediate_size": width, "head_dim": 10, "vocab_size": VOCABULARY + 3}
    model = model_of_config(AutoConfig.for_model(family, **{**settings(family), **odd}), weights)
    with Float32Mode(model.model):
        expected, actual = (model.states(runner, MIXED) for runner in (model.packed, model.runner))

    assert isinstance(runners_of(model.runner)[0], NativeRunner)
    sizes = (expected[0] - actual[0]).abs().amax(1) / expected[0].abs().max()
    assert float(sizes.quantile(0.9)) < (1e-5 if weights == 32 else 5e-2)
    assert float(sizes.max()) < (1e-5 if weights == 32 else 0.3 if weights == 4 else 5e-2)


BATCHED = [
    "llama",
    "gpt_neox",
    "mistral",
    "qwen2_moe",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5_text",
    "lfm2",
    "bamba",
    "nemotron_h",
    "mamba2",
]
WEIGHTS: tuple[Weights, ...] = (32, 16, 8, 4)
# All weights with attention and with a recurrence, all families with floats and with codes in turns.
QUICK = {*itertools.product(("llama", "qwen3_next"), WEIGHTS), *zip(BATCHED, itertools.cycle((32, 8)), strict=False)}


@pytest.mark.parametrize(("family", "weights"), quick(QUICK, itertools.product(BATCHED, WEIGHTS)))
def test_bits_do_not_depend_on_batch_or_chunks(family: str, weights: Weights) -> None:
    model, length = native(family, weights), 21
    alone = [((slot, 1),) for slot in range(8) for _ in range(length)]
    batch = [[(slot, 1) for slot in range(8)] for _ in range(length)]
    chunks = [((slot, rows),) for slot in range(8) for rows in (7, 1, 13)]
    expected, _ = model.states(model.runner, alone)

    assert torch.equal(expected, model.states(model.runner, batch)[0])
    assert torch.equal(expected, model.states(model.runner, chunks)[0])


@pytest.mark.parametrize("weights", [32, 16])
def test_bits_do_not_depend_on_the_number_of_rows(weights: Weights) -> None:
    """Few rows are computed by other code than tiles of many."""
    odd = {"hidden_size": 68, "intermediate_size": 101, "head_dim": 10, "vocab_size": VOCABULARY + 3}
    model = model_of_config(AutoConfig.for_model("llama", **{**settings("llama"), **odd}), weights)
    counts = range(1, 15)
    alone, _ = model.states(model.runner, [((0, 1),)] * sum(counts))

    assert torch.equal(alone, model.states(model.runner, [((0, count),) for count in counts])[0])


@pytest.mark.slow
@pytest.mark.parametrize("weights", [32, 16, 8, 4])
def test_rows_larger_than_the_cache_keep_their_bits(weights: Weights) -> None:
    model = model_of_config(
        AutoConfig.for_model("llama", **(settings("llama") | {"intermediate_size": 32768})), weights
    )
    together, _ = model.states(model.runner, (((0, 120),),))

    assert isinstance(runners_of(model.runner)[0], NativeRunner)
    assert torch.equal(together, model.states(model.runner, (((0, 41),), ((0, 1),), ((0, 2),), ((0, 76),)))[0])


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
def test_bits_do_not_depend_on_threads(family: str, weights: Weights) -> None:
    model, steps = native(family, weights), (*MIXED, ((0, 1),), ((1, 1),))
    expected, _ = model.states(model.runner, steps)

    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(expected, model.states(model.runner, steps)[0])


@pytest.mark.parametrize(
    ("family", "weights"),
    quick(
        [("llama", 8), ("llama", 4), ("qwen2", 4), ("phi3", 8), ("qwen3_5_text", 8)],
        itertools.product(("llama", "qwen2", "phi3", "qwen3_5_text"), (8, 4)),
    ),
)
def test_quantised_matrices_equal_the_modules(family: str, weights: Weights) -> None:
    model = native(family, weights)
    expected, _ = model.states(model.packed, MIXED)
    logits, states = model.states(model.runner, MIXED)
    head: nn.Module = model.model.get_output_embeddings()

    assert relative_error(head(states), logits) < 1e-6
    # A code in a thousand rounds the other way.
    assert relative_error(expected, logits) < 3e-2


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "mixtral", "deepseek_v3", "qwen3_next", "bamba"])
def test_bfloat16_weights_are_computed_in_float32(family: str) -> None:
    model = native(family, 16)
    with Float32Mode(model.model):
        expected, _ = model.states(model.packed, MIXED)
    logits, _ = model.states(unrounded(model), MIXED)

    assert torch.float32 == logits.dtype
    # Two orders of summation differ by up to 4.3e-5; bfloat16 would differ a hundred times as much.
    assert relative_error(expected, logits) < 1e-4


# Variants other than the fastest are slow to build.
SOME = [
    pytest.param(name, marks=[pytest.mark.slow] if at else []) for at, name in enumerate(libraries.variants("step"))
]


@pytest.mark.parametrize("variant", SOME)
def test_rows_are_rounded_for_bfloat16_products(variant: str) -> None:
    """Only where the processor multiplies bfloat16 pairs; sums are float32."""
    model = native("llama", 16)
    runner = NativeRunner(model.packed, decoder_of(model), step_library(variant))
    logits, states = model.states(runner, MIXED)
    rows = states.bfloat16().float() if variant in ("amx", "bfloat16") else states
    expected = rows @ model.model.get_output_embeddings().weight.float().T

    assert relative_error(expected, logits) < 1e-6


def test_weights_are_moved_not_copied() -> None:
    """Tied weights stay tied."""
    model = native("gemma", 16).model

    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert {0} == {own.data_ptr() % 64 for own in model.parameters() if own.dim() > 1}


def test_bfloat16_cells_equal_torch() -> None:
    """But for rounding."""
    model = native("qwen3")
    specs = [plan.spec for plan in model.packed.layers]
    buffers = []
    for runner in (model.packed, model.runner):
        some = Cache(specs, slots=1, capacity=32, cells=32, dtype=torch.bfloat16)
        with some.forward([Span(0, 0, 32)]) as forward:
            runner.run(StepInput(forward, [token(0, at) for at in range(32)], [31]))
            cells = forward.segments(0)[0].cells
            buffers.append([stored.read(cells, torch.float32) for stored in forward.layer_kv(0)])

    for expected, actual in zip(*buffers, strict=True):
        assert (expected != actual).float().mean() < 0.01
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-6)


def test_long_contexts_with_several_threads() -> None:
    model = native("llama")
    steps = (((0, CONTEXT - 3),), ((0, 1),), ((0, 2),))
    expected = model.states(model.runner, steps)[0]
    torch.set_num_threads(4)

    assert torch.equal(expected, model.states(model.runner, steps)[0])


@pytest.mark.parametrize(("family", "weights"), [("llama", 32), ("gpt_oss", 32), ("gpt_oss", 4)])
def test_nan_embedding_affects_its_sequence_only(family: str, weights: Weights) -> None:
    model, steps = native(family, weights), (((0, 5), (1, 5)), ((0, 1), (1, 1)))
    expected, _ = model.states(model.runner, steps)
    weight = model.model.get_input_embeddings().weight
    before = weight[token(1, 0)].clone()
    weight[token(1, 0)] = torch.nan
    try:
        actual, _ = model.states(model.runner, steps)
    finally:
        weight[token(1, 0)] = before

    assert torch.equal(expected[:6], actual[:6])
    assert actual[6:].isnan().all()


def test_bidirectional_ranges_run_in_the_modules() -> None:
    model, logits = native("llama"), []
    for runner in (model.packed, model.runner):
        some = Cache([plan.spec for plan in runner.layers], slots=1, capacity=16, cells=16, dtype=torch.float32)
        with some.forward([Span(0, 0, 9, bidirectional=((2, 6),))]) as forward:
            logits.append(runner.run(StepInput(forward, list(range(9)), list(range(9)))).logits)

    assert torch.equal(*logits)


@pytest.mark.parametrize("family", OTHERS)
def test_unsupported_models_run_in_the_modules(family: str) -> None:
    assert not isinstance(runners_of(tiny_model(family).runner)[0], NativeRunner)
