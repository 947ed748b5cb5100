"""Rotary factors that change with the length of a sequence: text equals `generate` alone on both sides of the original
length and across it, in any company, and nothing computed by one kind of factors serves the other.
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
from engine.model.sequential_runner import SequentialRunner
from engine.native.runner import NativeRunner
from engine.types.events import Finished
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine import speculated
from tests.engine.models import CONTEXT, ORIGINAL, VOCABULARY, Reference, core, load_model
from tests.engine.play import Job, ask, play
from tests.engine.speculated import Case, differences
from tests.engine.test_oracle import run
from tests.libraries import built

Models = Callable[..., LoadedModel]
References = Callable[..., Reference]

FAMILIES = ("phi3_long", "phimoe_long", "llama_long")
SHORT = tuple(range(3, 3 + ORIGINAL - 10))
LONG = tuple(range(60, 60 + ORIGINAL + 10))


def answers(
    loaded: LoadedModel, prompts: dict[str, tuple[int, ...]], count: int = 24, **settings: object
) -> dict[str, list[int]]:
    """What an engine says to prompts that arrive together."""
    engine = core(loaded, **settings)
    played = play(engine, [Job(ask(name, prompt, count, ignore_eos=True)) for name, prompt in prompts.items()])
    assert all(isinstance(answer.end, Finished) for answer in played.values())
    return {name: answer.tokens for name, answer in played.items()}


@pytest.fixture
def alone(folder: Callable[[str], Path]) -> Callable[[str, tuple[int, ...], int], list[int]]:
    """What a new model in transformers says, which no earlier text has left in any state."""

    @cache
    def generate(family: str, prompt: tuple[int, ...], count: int) -> list[int]:
        model = Reference(folder(family), torch.float64).model
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.inference_mode():
            said: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()
        return said[len(prompt) :]

    return generate


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_text_beside_a_long_one_is_what_it_is_alone(loaded: Models, alone: Callable, family: str) -> None:
    """A text within the original length, one that crosses it and one beyond it share all batches."""
    prompts = {"within": SHORT[:9], "across": SHORT, "beyond": LONG}

    assert {name: alone(family, prompt, 24) for name, prompt in prompts.items()} == answers(loaded(family), prompts)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_factors_change_what_is_said(loaded: Models, alone: Callable, family: str) -> None:
    """Long factors from the start would say something else: what the tests above tell apart is there."""
    says = alone(family, SHORT[:9], 24)
    switch = loaded(family).switch
    assert switch is not None
    runner = loaded(family).runner
    long_from_the_start = replace(switch, original_length=1)
    runner.switch = long_from_the_start
    try:
        assert says != answers(loaded(family), {"within": SHORT[:9]})["within"]
    finally:
        runner.switch = switch


@pytest.mark.parametrize("family", FAMILIES)
def test_any_mix_says_what_generate_says_alone(loaded: Models, reference: References, family: str) -> None:
    """Chunks, shared beginnings, cancels and preemption, with prompts on both sides of the original length."""
    judged = run(loaded, reference, family, range(3), "float64")
    judged += run(loaded, reference, family, range(2000, 2002), "float64", scarce=True)

    assert 200 < judged


@pytest.mark.parametrize("family", ["phi3_long", "llama_long"])
def test_the_native_step_says_the_same(folder: Callable[[str], Path], reference: References, family: str) -> None:
    """In float32 tokens differ from transformers' at ties only."""
    built("step")
    native = load_model(folder(family), "float32", threads=1)

    assert isinstance(native.runner, NativeRunner)
    assert 200 < run(lambda name, dtype: native, reference, family, range(3000, 3004), "float32")


@pytest.mark.parametrize("family", ["phi3_long", "llama_long"])
def test_one_sequence_at_a_time_says_the_same(loaded: Models, reference: References, family: str) -> None:
    """A model that cannot run packed chooses the factors of a chunk by its sequence too."""
    gathering = SequentialRunner(loaded(family).model, loaded(family).runner.switch)
    model = loaded(family).model
    packed = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        one_by_one = replace(loaded(family), runner=gathering)
        assert 100 < run(lambda name, dtype: one_by_one, reference, family, range(3), "float64")
    finally:
        model.set_attn_implementation(packed)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_context_within_the_original_length_has_short_factors_only(
    loaded: Models, alone: Callable, family: str
) -> None:
    """Served so, nothing switches, and a shift turns keys by the short factors."""
    short = replace(loaded(family), info=replace(loaded(family).info, context=ORIGINAL))
    said = answers(short, {"one": SHORT[:9]}, slots=2, context=ORIGINAL)

    assert short.switch is None
    assert short.layers == short.runner.layers
    assert alone(family, SHORT[:9], 24) == said["one"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_that_crosses_the_length_takes_nothing_from_the_turn_before(
    loaded: Models, alone: Callable, family: str
) -> None:
    """Cells by short factors do not serve a prompt beyond the original length; those by long ones serve the next."""
    engine = core(loaded(family), slots=2)
    said = play(engine, [Job(ask("first", SHORT, 4, ignore_eos=True))])["first"].tokens
    second = (*SHORT, *said, *range(200, 220))
    later = play(engine, [Job(ask("second", second, 8, ignore_eos=True))])["second"]
    third = (*second, *later.tokens, 7, 8)
    last = play(engine, [Job(ask("third", third, 8, ignore_eos=True))])["third"]

    assert isinstance(later.end, Finished)
    assert isinstance(last.end, Finished)
    assert 0 == later.end.usage.cached_tokens
    assert len(second) <= last.end.usage.cached_tokens
    assert alone(family, second, 8) == later.tokens
    assert alone(family, third, 8) == last.tokens


@pytest.mark.parametrize("family", ["phi3_long", "llama_long"])
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
def test_drafts_company_and_shifts_change_no_token(
    loaded: Models, monkeypatch: pytest.MonkeyPatch, family: str, drafter: str, batch: int, chunk: int, event: str
) -> None:
    """Texts cross the original length at all places of a draft, and behind it the context shifts."""
    monkeypatch.setitem(speculated.KINDS, family, family)

    assert [] == differences(Case(drafter, family, batch, chunk, event), loaded)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extended", [False, True])
def test_a_shift_turns_keys_by_the_factors_they_have(loaded: Models, family: str, extended: bool) -> None:
    """The first layer's keys depend on tokens and positions alone: turned ones equal those computed anew."""
    model = loaded(family)
    layers = model.runner.extended_layers if extended else model.runner.layers
    tokens = [token % VOCABULARY for token in range(7, 7 + 30)]

    def keys(slot: int, tokens: list[int], cache: Cache) -> torch.Tensor:
        spans = [Span(slot, 0, len(tokens), long_factors=extended)] if tokens else []
        if spans:
            with cache.forward(spans) as forward:
                model.runner.run(forward, tokens, [len(tokens) - 1])
        group, own = cache.layer_group(0)
        return group.pool.keys.read(own, group.cells_from(slot, 0), torch.float64)

    cache = Cache([plan.spec for plan in layers], slots=2, capacity=CONTEXT, cells=2 * CONTEXT, dtype=torch.float64)
    keys(0, tokens, cache)
    assert 22 == cache.shift(0, 4, 8)
    moved, fresh = keys(0, [], cache), keys(1, [*tokens[:4], *tokens[12:]], cache)

    assert torch.allclose(moved, fresh, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extended", [True, False])
def test_the_self_test_compares_with_factors_that_transformers_chooses(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, extended: bool
) -> None:
    """A runner that rotates every row by one kind of factors, whichever it is, is refused."""

    def rows(_: RopeSwitch, spans: list[Span]) -> torch.Tensor:
        return torch.full((sum(span.length for span in spans),), extended)

    monkeypatch.setattr(RopeSwitch, "extended", rows)

    with pytest.raises(ModelUnsupported, match=r"its logits differ.*, nor one sequence at a time .*its logits differ"):
        load_model(folder(family))


def test_layers_that_change_at_different_lengths_are_refused() -> None:
    """A sequence is on one side of one length."""
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = torch.nn.Module()
    for at, length in enumerate((4, 8)):
        part = model.register_module(f"{at}", torch.nn.Module()) or getattr(model, f"{at}")
        part.rope_type = "longrope"
        part.config = copy(config)
        part.config.rope_parameters = {"original_max_position_embeddings": length}

    with pytest.raises(ValueError, match=r"at different lengths: \[4, 8\]"):
        original_length(model)
