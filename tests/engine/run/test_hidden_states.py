"""Hidden states after named layers are those of transformers, from every runner, in chunks and ragged batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.native.runner import NativeRunner
from engine.parallel.loading import loaded_model
from engine.run.graphs import GraphRunner
from engine.run.packed import PackedRunner
from engine.run.runner import ModelRunner, runners_of
from engine.run.sequential import SequentialRunner
from engine.step.input import FINAL_NORM, HiddenRows, StepFeatures, StepInput
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine.kit.models import Models, References, core, load_model
from tests.engine.parallel.stories import core_of
from tests.engine.parallel.test_equality import config, ignore
from tests.engine.run.test_graphs import CountingRecorder, recorder
from tests.fake_device import FAKE
from tests.selection import quick

__all__ = ["recorder"]

Folder = Callable[[str], Path]
# By text and position.
States = dict[tuple[int, int], Tensor]
# With windows, with recurrent states, with latent attention and experts, with sinks.
FAMILIES = ("llama", "gemma3", "qwen3_next", "deepseek_v3", "gpt_oss")
TEXTS = ([5, 9, 200, 31, 7, 88, 120, 14, 66, 3, 45], [17, 4, 250, 99, 8, 61], [40, 12, 13, 77])
# Of each step (text, length): a prompt alone; chunks beside decoded tokens and another prompt; single tokens.
STEPS = ([(0, 4)], [(1, 3), (0, 5), (2, 1)], [(2, 2)], [(0, 1), (1, 1), (2, 1)], [(0, 1), (1, 2)])


def of_transformers(model: Any) -> dict[int, list[Tensor]]:
    """By layer, the hidden states [tokens, width] of each text."""
    # transformers returns the output of the last layer after the final norm only.
    outputs: list[Tensor] = []
    handle = model.get_decoder().norm.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0][0]))
    with torch.inference_mode():
        states = [model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states for text in TEXTS]
    handle.remove()
    after = {layer - 1: [own[layer][0] for own in states] for layer in range(1, len(states[0]) - 1)}
    return {**after, len(after): outputs, FINAL_NORM: [own[-1][0] for own in states]}


def of_runner(runner: ModelRunner, cache: Cache, layers: Sequence[int], every: int) -> dict[int, States]:
    """The same of a runner, of every so many tokens."""
    found: dict[int, States] = {layer: {} for layer in layers}
    for step in STEPS:
        spans = [Span(slot, cache.cached_length(slot), length) for slot, length in step]
        places = [(span.slot, position) for span in spans for position in range(span.start, span.stop)]
        rows = range(len(places))[::every]
        logit_rows = range(len(places)) if len(step) > 1 else [len(places) - 1]
        tokens = [TEXTS[text][position] for text, position in places]
        with cache.forward(spans) as forward:
            output = runner.run(StepInput(forward, tokens, logit_rows, HiddenRows(rows, layers)))
        assert len(output.logits) == len(logit_rows)
        for layer in layers:
            states = output.hidden_states[layer].cpu()
            found[layer] |= dict(zip([places[row] for row in rows], states, strict=True))
    return found


def require_equal(expected: Mapping[int, list[Tensor]], actual: Mapping[int, States], every: int) -> None:
    """All states are those of transformers; with every token there is one for each."""
    for layer, states in actual.items():
        for (text, position), state in states.items():
            torch.testing.assert_close(state, expected[layer][text][position], atol=1e-3, rtol=1e-3)
        assert len(states) >= (sum(map(len, TEXTS)) if every == 1 else len(STEPS))


def cache_of(runner: ModelRunner) -> Cache:
    """An empty cache for the texts."""
    specs = [plan.spec for plan in runner.layers]
    return Cache(specs, slots=len(TEXTS), capacity=32, cells=96, state_bytes=2**24)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_transformers(family: str, every: int, loaded: Models, reference: References) -> None:
    """In one native call, and packed: of all layers, of the last one, and after the final norm alone."""
    expected = of_transformers(reference(family, "float32").model)
    last = len(expected) - 2
    runners = runners_of(loaded(family, "float32").runner)

    assert isinstance(runners[-1], PackedRunner)
    # The native step has no latent attention.
    assert isinstance(runners[0], NativeRunner)
    for runner, layers in product(runners, ([*expected], [last], [FINAL_NORM])):
        require_equal(expected, of_runner(runner, cache_of(runner), layers, every), every)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "gpt_oss"])
def test_states_of_a_sequential_runner(family: str, reference: References) -> None:
    model = reference(family, "float32").model
    expected = of_transformers(model)
    runner = SequentialRunner(model)
    runner.has_hidden_states = True

    require_equal(expected, of_runner(runner, cache_of(runner), [*expected], 2), 2)


@pytest.mark.parametrize("family", quick(["llama"], FAMILIES))
def test_states_of_recorded_steps(
    family: str, folder: Folder, reference: References, recorder: CountingRecorder
) -> None:
    """Steps with other layers are recorded anew; a replay returns the states of its own batch."""
    expected = of_transformers(reference(family, "float32").model)
    loaded = load_model(folder(family), "float32", device=FAKE)
    (runner,) = runners_of(loaded.runner)
    assert isinstance(runner, GraphRunner)
    for layers in ([*expected], [FINAL_NORM], [0]):
        cache = core(loaded, slots=len(TEXTS), context=32).cache
        before = recorder.replayed
        require_equal(expected, of_runner(runner, cache, layers, 2), 2)
        assert recorder.replayed > before


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_states_of_two_ranks(family: str, folder: Folder, reference: References) -> None:
    expected = of_transformers(reference(family, "float32").model)
    with loaded_model(config(folder(family), "float32", 2), ignore, ignore, reserved_bytes=0) as divided:
        cache = core_of(divided, slots=len(TEXTS), cells=96, context=32).cache
        require_equal(expected, of_runner(divided.runner, cache, [*expected], 2), 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_runner_has_states_of_a_missing_layer(family: str, loaded: Models) -> None:
    for runner in runners_of(loaded(family, "float32").runner):
        assert runner.supports(StepFeatures(hidden_layers=(0, 1, FINAL_NORM))) is None
        assert "no layer 9" in (runner.supports(StepFeatures(hidden_layers=(0, 9))) or "")
        assert "no layer -2" in (runner.supports(StepFeatures(hidden_layers=(-2,))) or "")


def test_a_step_leaves_no_hook(loaded: Models) -> None:
    """A hook would cost every later step, and keep the model from being recorded."""
    packed = runners_of(loaded("llama", "float32").runner)[-1]
    assert isinstance(packed, PackedRunner)
    of_runner(packed, cache_of(packed), (0, 1), 1)

    modules = list(packed.model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
