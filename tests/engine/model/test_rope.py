"""Rotary factors that depend on the length of a sequence: text equals `generate` alone on both sides of the original
length and across it, in any batch, and cells of one kind of factors do not serve the other.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from engine.errors import ModelUnsupported
from engine.load.load import LoadedModel
from engine.model.rope import RopeSwitch, original_length
from engine.native.runner import NativeRunner
from engine.run.runner import runners_of
from engine.run.sequential import SequentialRunner
from engine.step.input import StepInput
from engine.types.events import Finished
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine.kit import speculated
from tests.engine.kit.models import CONTEXT, ORIGINAL, VOCABULARY, Models, Reference, References, core, load_model
from tests.engine.kit.play import Job, ask, play
from tests.engine.kit.speculated import Case, differences
from tests.engine.test_oracle import run
from tests.libraries import built
from tests.selection import quick

FAMILIES = ("phi3_long", "phimoe_long", "llama_long")
every_family = pytest.mark.parametrize("family", quick(("phi3_long",), FAMILIES))
SHORT = tuple(range(3, 3 + ORIGINAL - 10))
LONG = tuple(range(60, 60 + ORIGINAL + 10))


def answers(
    loaded: LoadedModel, prompts: dict[str, tuple[int, ...]], count: int = 24, **settings: object
) -> dict[str, list[int]]:
    """The completions of prompts that arrive together."""
    engine = core(loaded, **settings)
    played = play(engine, [Job(ask(name, prompt, count, ignore_eos=True)) for name, prompt in prompts.items()])
    assert all(isinstance(answer.end, Finished) for answer in played.values())
    return {name: answer.tokens for name, answer in played.items()}


@pytest.fixture
def alone(folder: Callable[[str], Path]) -> Callable[[str, tuple[int, ...], int], list[int]]:
    """The completion of a newly loaded model in transformers, without state of earlier texts."""

    @cache
    def generate(family: str, prompt: tuple[int, ...], count: int) -> list[int]:
        model = Reference(folder(family), torch.float64).model
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.inference_mode():
            tokens: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()
        return tokens[len(prompt) :]

    return generate


@every_family
def test_longrope_sequences_of_all_lengths_share_a_batch(loaded: Models, alone: Callable, family: str) -> None:
    """A text within the original length, one that crosses it and one beyond it have the logits of each alone."""
    prompts = {"within": SHORT[:9], "across": SHORT, "beyond": LONG}

    assert {name: alone(family, prompt, 24) for name, prompt in prompts.items()} == answers(loaded(family), prompts)


@every_family
def test_long_factors_change_the_text(loaded: Models, alone: Callable, family: str) -> None:
    """The tiny models are sensitive to the factors."""
    output = alone(family, SHORT[:9], 24)
    switch = loaded(family).switch
    assert switch is not None
    runner = loaded(family).runner
    long_from_the_start = replace(switch, original_length=1)
    runner.switch = long_from_the_start
    try:
        assert output != answers(loaded(family), {"within": SHORT[:9]})["within"]
    finally:
        runner.switch = switch


@every_family
def test_longrope_text_equals_generate_in_any_batch(loaded: Models, reference: References, family: str) -> None:
    """Chunks, shared prefixes, cancellation and preemption, with prompts on both sides of the original length."""
    judged = run(loaded, reference, family, range(3), "float64")
    judged += run(loaded, reference, family, range(2000, 2002), "float64", scarce=True)

    assert 200 < judged


@pytest.mark.parametrize("family", quick(("llama_long",), ("phi3_long", "llama_long")))
def test_native_step_text_equals_generate_with_longrope(
    folder: Callable[[str], Path], reference: References, family: str
) -> None:
    """In float32 tokens differ from transformers' at ties only."""
    built("step")
    native = load_model(folder(family), "float32", threads=1)

    assert isinstance(runners_of(native.runner)[0], NativeRunner)
    assert 200 < run(lambda name, dtype: native, reference, family, range(3000, 3004), "float32")


@pytest.mark.parametrize("family", quick(("llama_long",), ("phi3_long", "llama_long")))
def test_sequential_runner_text_equals_generate_with_longrope(
    loaded: Models, reference: References, family: str
) -> None:
    gathering = SequentialRunner(loaded(family).model, loaded(family).runner.switch)
    model = loaded(family).model
    packed = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        one_by_one = replace(loaded(family), runner=gathering)
        assert 100 < run(lambda name, dtype: one_by_one, reference, family, range(3), "float64")
    finally:
        model.set_attn_implementation(packed)


@every_family
def test_context_within_the_original_length_uses_short_factors(loaded: Models, alone: Callable, family: str) -> None:
    """Nothing switches, and a shift rotates keys by the short factors."""
    short = replace(loaded(family), info=replace(loaded(family).info, context=ORIGINAL))
    tokens = answers(short, {"one": SHORT[:9]}, slots=2, context=ORIGINAL)

    assert short.switch is None
    assert short.layers == short.runner.layers
    assert alone(family, SHORT[:9], 24) == tokens["one"]


@every_family
def test_prefix_with_short_factors_is_not_reused_beyond_the_length(
    loaded: Models, alone: Callable, family: str
) -> None:
    """Cells with short factors do not serve a prompt beyond the original length; long ones serve the next."""
    engine = core(loaded(family), slots=2)
    tokens = play(engine, [Job(ask("first", SHORT, 4, ignore_eos=True))])["first"].tokens
    second = (*SHORT, *tokens, *range(200, 220))
    later = play(engine, [Job(ask("second", second, 8, ignore_eos=True))])["second"]
    third = (*second, *later.tokens, 7, 8)
    last = play(engine, [Job(ask("third", third, 8, ignore_eos=True))])["third"]

    assert isinstance(later.end, Finished)
    assert isinstance(last.end, Finished)
    assert 0 == later.end.usage.cached_tokens
    assert len(second) <= last.end.usage.cached_tokens
    assert alone(family, second, 8) == later.tokens
    assert alone(family, third, 8) == last.tokens


@pytest.mark.parametrize("family", quick(("llama_long",), ("phi3_long", "llama_long")))
@pytest.mark.parametrize(
    ("drafter", "batch", "chunk", "event"),
    [
        ("partly", 3, 7, "nothing"),
        ("right", 1, 64, "nothing"),
        ("lookup", 3, 1, "preempt"),
        ("itself", 3, 64, "nothing"),
        ("none", 3, 7, "shift"),
        ("partly", 3, 64, "shift"),
    ],
)
def test_drafts_batches_and_shifts_change_no_token_with_longrope(
    loaded: Models, monkeypatch: pytest.MonkeyPatch, family: str, drafter: str, batch: int, chunk: int, event: str
) -> None:
    """Texts cross the original length at every position of a draft, and the context shifts beyond it."""
    monkeypatch.setitem(speculated.KINDS, family, family)

    assert [] == differences(Case(drafter, family, batch, chunk, event), loaded)


@every_family
@pytest.mark.parametrize("long_factors", [False, True])
def test_shift_rotates_keys_by_their_own_factors(loaded: Models, family: str, long_factors: bool) -> None:
    """The first layer's keys depend on tokens and positions only: rotated keys equal recomputed ones."""
    model = loaded(family)
    layers = model.runner.long_factor_layers if long_factors else model.runner.layers
    tokens = [token % VOCABULARY for token in range(7, 7 + 30)]

    def keys(slot: int, tokens: list[int], cache: Cache) -> torch.Tensor:
        spans = [Span(slot, 0, len(tokens), long_factors=long_factors)] if tokens else []
        if spans:
            with cache.forward(spans) as forward:
                model.runner.run(StepInput(forward, tokens, [len(tokens) - 1]))
        group, own = cache.layer_group(0)
        return group.pool.keys.read(own, group.cells_from(slot, 0), torch.float64)

    cache = Cache([plan.spec for plan in layers], slots=2, capacity=CONTEXT, cells=2 * CONTEXT, dtype=torch.float64)
    keys(0, tokens, cache)
    assert 22 == cache.shift(0, 4, 8)
    moved, fresh = keys(0, [], cache), keys(1, [*tokens[:4], *tokens[12:]], cache)

    assert torch.allclose(moved, fresh, atol=1e-9)


@every_family
@pytest.mark.parametrize("long_factors", [True, False])
def test_self_test_refuses_one_kind_of_factors_for_all_tokens(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, long_factors: bool
) -> None:
    def rows(_: RopeSwitch, spans: list[Span]) -> torch.Tensor:
        return torch.full((sum(span.length for span in spans),), long_factors)

    monkeypatch.setattr(RopeSwitch, "long_factors", rows)

    with pytest.raises(ModelUnsupported, match=r"its logits differ.*, nor one sequence at a time .*its logits differ"):
        load_model(folder(family))


def test_layers_with_different_original_lengths_are_refused() -> None:
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = torch.nn.Module()
    for at, length in enumerate((4, 8)):
        part = model.register_module(f"{at}", torch.nn.Module()) or getattr(model, f"{at}")
        part.rope_type = "longrope"
        part.config = copy(config)
        part.config.rope_parameters = {"original_max_position_embeddings": length}

    with pytest.raises(ValueError, match=r"at different lengths: \[4, 8\]"):
        original_length(model)
