"""The sequential runner, layers that share cells, and layers with masks of their own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from engine.kernels.products import TiledProduct
from engine.model import hooks
from engine.model.layers import CalibrationBackend, find_cached_layers
from engine.run.packed import PackedRunner
from engine.run.sequential import SequentialRunner, UnsupportedCache
from engine.step.input import StepInput
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine.kit import tiny
from tests.engine.kit.families import CHECKS, VOCABULARY, build
from tests.selection import quick


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers warns of settings that only tiny models have
@pytest.mark.parametrize("name", quick(("glm_moe_dsa", "doge"), ("glm_moe_dsa", "deepseek_v32", "doge")))
def test_sparse_selection_among_ties_is_independent_of_chunks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Where many positions score the same, chunks and resumed prompts change nothing.

    Both heads of an indexer score nothing for many positions; a dynamic mask that was never trained tells none apart.
    """
    monkeypatch.setitem(tiny.FAMILIES, name, {**tiny.FAMILIES[name], "index_n_heads": 2})
    monkeypatch.setattr("tests.engine.kit.families.plant", lambda model: None)
    family = build(name)

    assert isinstance(family.runner, SequentialRunner)
    assert {check: True for check in CHECKS} == {name: check(family) for name, check in CHECKS.items()}


def alone(model: Any, tokens: list[int]) -> Tensor:
    """The logits [tokens, vocabulary] of the unmodified model."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def cache(runner: SequentialRunner | PackedRunner) -> Cache:
    """A cache for three sequences of twenty tokens."""
    return Cache([plan.spec for plan in runner.layers], slots=3, capacity=20, cells=60)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mpt", "glm_moe_dsa", "gpt_neo"])
def test_logit_rows_are_in_batch_order(name: str) -> None:
    """Several spans, with no row of one and two of another."""
    family = build(name)
    prompts = [list(family.prompt[at : at + 12]) for at in (0, 3, 6)]
    memory = cache(family.runner)
    with memory.forward([Span(0, 0, 5), Span(1, 0, 3)]) as forward:
        family.runner.run(StepInput(forward, [*prompts[0][:5], *prompts[1][:3]], [7]))
    with memory.forward([Span(2, 0, 4), Span(0, 5, 7), Span(1, 3, 2)]) as forward:
        rows = family.runner.run(
            StepInput(forward, [*prompts[2][:4], *prompts[0][5:12], *prompts[1][3:5]], [5, 10, 12])
        ).logits

    family.model.set_attn_implementation("eager")
    first, second = alone(family.model, prompts[0]), alone(family.model, prompts[1])
    assert torch.allclose(torch.stack((first[6], first[11], second[4])), rows, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "dtype"),
    quick(
        [("bloom", torch.int8), ("deepseek_v32", torch.int8), ("opt", torch.bfloat16)],
        itertools.product(("bloom", "deepseek_v32", "opt", "falcon", "axk2"), (torch.int8, torch.bfloat16)),
    ),
)
def test_chunks_attend_to_the_rounded_keys_of_cells(name: str, dtype: torch.dtype) -> None:
    """Bit for bit, in cells of another format than the model."""
    family = build(name)
    assert isinstance(family.runner, SequentialRunner)
    family.runner.make_invariant(TiledProduct())
    expected = rows_in_chunks(family.runner, family.prompt[:20], 20, dtype)

    assert not torch.equal(expected, rows_in_chunks(family.runner, family.prompt[:20], 20, torch.float32))
    for size in (1, 7):
        assert torch.equal(expected, rows_in_chunks(family.runner, family.prompt[:20], size, dtype))


def rows_in_chunks(runner: SequentialRunner, tokens: tuple[int, ...], size: int, dtype: torch.dtype) -> Tensor:
    """The logits [tokens, vocabulary] of a prompt in chunks, with cells of a dtype."""
    specs = [plan.spec for plan in runner.layers]
    memory, rows = Cache(specs, slots=1, capacity=20, cells=20, dtype=dtype), []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        with memory.forward([Span(0, start, len(part))]) as forward:
            rows.append(runner.run(StepInput(forward, part, list(range(len(part))))).logits)
    return torch.cat(rows)


@pytest.mark.filterwarnings("ignore")
def test_indexer_keys_are_stored_in_value_columns() -> None:
    model = build("glm_moe_dsa").model
    model.set_attn_implementation("eager")
    memory = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([[1, 2]]), past_key_values=memory)

    widths = {layer.values.shape[-1] + layer.indexer_keys.shape[-1] for layer in memory.layers}

    assert widths == {plan.spec.value_width for plan in SequentialRunner(model).layers}


class Keeping(nn.Module):
    """A model with something other than keys and values in its cache, or nothing."""

    def __init__(self, kind: type | None) -> None:
        super().__init__()
        self.weight, self._kind, self.config, self.dtype = nn.Parameter(torch.zeros(1)), kind, None, torch.float32

    def forward(self, input_ids: Tensor, past_key_values: Any, logits_to_keep: Tensor) -> Any:
        """Placeholder logits."""
        if self._kind is not None:
            past_key_values.layers = [self._kind()]
            past_key_values.layers[0].update_conv_state(torch.zeros(1, 4, 4))
            past_key_values.layers[0].is_initialized = True
        return type("Output", (), {"logits": torch.zeros(1, len(logits_to_keep), 4)})


@pytest.mark.parametrize("kind", [None, LinearAttentionLayer])
def test_model_without_key_value_cache_is_refused(kind: type | None) -> None:
    with pytest.raises(UnsupportedCache):
        SequentialRunner(Keeping(kind))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_kv_sharing_layers_store_nothing(name: str) -> None:
    """The last layer of each type has the cells of the layers behind it that compute no keys."""
    family = build(name)
    types = family.model.config.get_text_config().layer_types
    readers = {plan.index: plan.sharing_layers for plan in family.runner.layers}

    assert {0: (), 1: (), 2: (4,), 3: (5,)} == readers
    assert all(types[layer] == types[reader] for layer, own in readers.items() for reader in own)


def call(layer: int, key: Tensor, value: Tensor, window: int | None = None) -> hooks.AttentionCall:
    """One layer's attention call."""
    return hooks.AttentionCall(layer, key, key, value, 1.0, window, None, None)


def test_shared_tensors_are_stored_once_for_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tensors at other addresses, or with another window, are stored again."""
    key, value = torch.ones(1, 2, 4), torch.ones(1, 2, 4)
    calls = [
        call(0, key, value),
        call(1, key.clone(), value),
        call(2, key, value, window=8),
        call(3, key, value),
        call(4, key, value, window=8),
    ]

    def run(model: Any, *rows: Tensor) -> None:
        for each in calls:
            hooks._state.get().backend.attend(each)

    monkeypatch.setattr(hooks, "forward", run)

    class Bare(nn.Linear):
        """A model without layers."""

        class config:
            @classmethod
            def get_text_config(cls) -> type:
                """Itself."""
                return cls

    plans = find_cached_layers(Bare(1, 1), vocabulary=VOCABULARY)

    assert {0: (3,), 1: (), 2: (4,)} == {plan.index: plan.sharing_layers for plan in plans}


@pytest.mark.parametrize(
    "own",
    [
        {"attention_mask": torch.zeros(1, 1, 2, 2)},
        {"indices": torch.zeros(1, 2, 1, dtype=torch.int32)},
        {"block_indices": torch.zeros(1, 2, 1, dtype=torch.int32)},
    ],
    ids=lambda own: next(iter(own)),
)
def test_layer_with_its_own_mask_or_selection_is_not_packed(own: dict[str, Tensor]) -> None:
    module = nn.Module()
    module.layer_idx, module.is_causal, module.training = 0, True, False  # type: ignore[assignment]
    rows = torch.ones(1, 1, 2, 4)
    mask = own.get("attention_mask")
    others = {name: value for name, value in own.items() if name != "attention_mask"}

    with hooks.use_backend(CalibrationBackend()):
        hooks._attention(module, rows, rows, rows, None, indices=None)
        with pytest.raises(NotImplementedError, match=next(iter(own))):
            hooks._attention(module, rows, rows, rows, mask, **others)


@pytest.mark.filterwarnings("ignore")
def test_family_with_an_indexer_uses_the_sequential_runner() -> None:
    model = build("glm_moe_dsa").model
    model.set_attn_implementation(hooks.ATTENTION_NAME)
    with pytest.raises(TypeError):  # it adds its selection to the mask that it would get from others
        find_cached_layers(model, vocabulary=VOCABULARY)
