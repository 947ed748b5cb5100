"""Pooled vectors equal the model's own alone, with any cache, chunks and batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import AutoConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from engine.load.check.selftest import ModelTraits, find_runner
from engine.model import hooks
from engine.sample.pooling import PromptPooler
from engine.step.input import FINAL_NORM, HiddenRows, StepInput
from engine.types.events import Failed, Finished
from engine.types.request import Pooling, Request
from kvcache.spec import Span
from tests.engine.kit.families import build
from tests.engine.kit.mixes import prompts
from tests.engine.kit.models import CONTEXT, Models, Reference, References, core
from tests.engine.kit.play import Answer, Job, ask, play
from tests.engine.kit.tiny import settings


def vector(answer: Answer) -> torch.Tensor:
    """The vector of a request, which must be its only result."""
    assert isinstance(answer.end, Finished), answer.end
    assert ("length", None, [], "") == (answer.end.reason, answer.end.stop, answer.tokens, answer.text)
    (embedded,) = answer.embedded
    return torch.from_numpy(np.frombuffer(embedded.vector, "<f4").copy())


def expected(reference: Reference, request: Request) -> torch.Tensor:
    """The last hidden states of transformers, behind the last norm."""
    with torch.inference_mode():
        inputs = torch.tensor([request.prompt])
        states: torch.Tensor = reference.model.base_model(input_ids=inputs, use_cache=False).last_hidden_state[0]
    return (states[-1] if request.pooling == "last" else states.mean(0)).float()


def traffic(seed: int, pool: Sequence[tuple[int, ...]]) -> list[Job]:
    """Requests with both kinds of pooling and requests that generate, with shared prefixes."""
    chance = random.Random(seed)
    jobs = []
    for number in range(chance.randint(3, 9)):
        fields: dict[str, object] = {"pooling": chance.choice(("last", "mean", None))}
        if chance.random() < 0.3:
            fields |= {"score_from": 1}
        request = ask(f"{seed}-{number}", chance.choice(pool), 4, ignore_eos=True, **fields)
        jobs.append(Job(request, chance.choice((0, chance.randint(0, 12)))))
    return jobs


@pytest.mark.parametrize("family", ["llama", "gemma3", "minicpm3", "jamba", "gpt2"])
def test_vectors_equal_the_model_alone_in_any_batch(loaded: Models, reference: References, family: str) -> None:
    compared, pool = 0, prompts(len(family))
    for seed in range(4):
        chance = random.Random(seed)
        cells = CONTEXT + 30 if seed % 2 == 0 else 4 * CONTEXT
        engine = core(loaded(family), slots=chance.choice((1, 2, 4)), chunk=chance.choice((3, 16, 256)), cells=cells)
        jobs = traffic(seed, pool)
        answers = play(engine, jobs)
        for job in jobs:
            answer = answers[job.request.id]
            if job.request.pooling is None:
                assert (4, []) == (len(answer.tokens), answer.embedded)
                continue
            # MiniCPM divides by a constant before the output layer: compare the direction.
            right, found = (normalize(one, dim=0) for one in (expected(reference(family), job.request), vector(answer)))
            assert torch.allclose(right, found, rtol=1e-6, atol=1e-6)
            compared += 1

    assert 8 < compared


@pytest.mark.parametrize("family", ["llama", "gemma3", "jamba", "gpt2"])
def test_a_prompt_may_fill_the_context(loaded: Models, reference: References, family: str) -> None:
    prompt = [3 + at * 7 % 250 for at in range(CONTEXT)]
    engine = core(loaded(family), slots=2, chunk=16, cells=CONTEXT)
    jobs = [Job(ask(f"{kind}-{at}", prompt, pooling=kind)) for at in range(2) for kind in ("last", "mean")]
    scored = Job(ask("scored", prompt, 0, score_from=0))
    answers = play(engine, [*jobs, scored])

    for job in jobs:
        right, found = expected(reference(family), job.request), vector(answers[job.request.id])
        assert torch.allclose(normalize(right, dim=0), normalize(found, dim=0), rtol=1e-6, atol=1e-6)
    (scores,) = answers["scored"].scored
    assert CONTEXT == len(scores.tokens)


@pytest.mark.parametrize(("kind", "cached"), [("last", 39), ("mean", 0)])
def test_mean_pooling_needs_all_states_and_last_needs_one(loaded: Models, kind: Pooling, cached: int) -> None:
    engine = core(loaded("llama"))
    play(engine, [Job(ask("before", range(40), 4))])
    answer = play(engine, [Job(ask("vector", range(40), pooling=kind))])["vector"]

    assert cached == answer.started[0].cached_tokens
    assert 39 == play(engine, [Job(ask("after", range(40), 1))])["after"].started[0].cached_tokens


def test_pooling_computes_no_logits(loaded: Models) -> None:
    model, engine, rows = loaded("llama").model, core(loaded("llama")), []
    hook = model.lm_head.register_forward_hook(lambda _, inputs, output: rows.append(output.shape[1]))
    play(engine, [Job(ask("vector", range(40), pooling="mean")), Job(ask("text", (9, 8, 7), 1))])
    hook.remove()

    assert [1] == rows


def test_a_state_that_is_not_finite_fails(loaded: Models) -> None:
    model, engine = loaded("llama").model, core(loaded("llama"))
    hook = model.model.norm.register_forward_hook(lambda _, inputs, output: output * torch.nan)
    answer = play(engine, [Job(ask("vector", range(9), pooling="last"))])["vector"]
    hook.remove()

    assert isinstance(answer.end, Failed)
    assert 0 == play(engine, [Job(ask("again", range(9), 1))])["again"].started[0].cached_tokens


@pytest.mark.filterwarnings("ignore")  # transformers warns of settings that only tiny models have
@pytest.mark.parametrize("name", ["mpt", "gpt_neo", "qwen3"])
def test_the_sequential_runner_returns_states_too(name: str) -> None:
    family = build(name)
    assert family.runner.has_hidden_states
    cache, (first, second) = family.cache(), (family.prompt[:7], family.prompt[5:9])
    with cache.forward([Span(0, 0, 7), Span(1, 0, 4)]) as forward:
        output = family.runner.run(StepInput(forward, [*first, *second], [6, 8], HiddenRows([3, 6, 9])))
    logits, states = output.logits, output.hidden_states[FINAL_NORM]

    family.model.set_attn_implementation("eager")
    for tokens, rows in ((first, ((3, 0), (6, 1))), (second, ((2, 2),))):
        alone = family.model.base_model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        for position, row in rows:
            assert torch.allclose(alone[position], states[row], atol=1e-3)
    assert torch.allclose(family.alone(first), logits[0], atol=1e-3)
    assert torch.allclose(family.alone(second[:2]), logits[1], atol=1e-3)


class Quiet(LlamaForCausalLM):  # type: ignore[misc]
    """Computes its logits without a call of its output layer."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> CausalLMOutputWithPast:
        """The logits of every row."""
        own = {"position_ids": position_ids, "past_key_values": past_key_values, "use_cache": use_cache}
        states = self.model(input_ids=input_ids, **own).last_hidden_state
        return CausalLMOutputWithPast(logits=nn.functional.linear(states, self.lm_head.weight))


@pytest.mark.parametrize(("kind", "shown"), [(Quiet, False), (LlamaForCausalLM, True)])
def test_missing_hidden_states_are_found_at_load(kind: type[Any], shown: bool) -> None:
    config = AutoConfig.for_model("llama", **settings("llama"))
    model = kind(config).eval().requires_grad_(False)
    facts = ModelTraits(vocabulary=config.vocab_size, recurrent=False, dtype=torch.float32)

    assert shown == find_runner("quiet", model, facts).has_hidden_states


@pytest.mark.parametrize("kept", [True, False])
def test_a_model_may_compute_logits_for_every_row(kept: bool) -> None:
    layer, rows = nn.Linear(4, 3), torch.randn(6, 4)
    model = SimpleNamespace(get_output_embeddings=lambda: layer)
    output_rows, indices = (
        torch.tensor([0, 2, 3, 5]),
        hooks.OutputIndices(torch.tensor([1, 2]), torch.tensor([0, 2, 3])),
    )
    with hooks.capture_hidden_states(model, output_rows, indices) as states:
        logits = layer((rows[output_rows] if kept else rows)[None])

    assert torch.equal(layer(rows)[[2, 3]], logits[0])
    assert torch.equal(rows[[0, 3, 5]], states[FINAL_NORM])


def test_a_model_that_bypasses_its_output_layer_is_refused() -> None:
    model = SimpleNamespace(get_output_embeddings=lambda: nn.Linear(4, 3))

    row = torch.tensor([0])

    with pytest.raises(NotImplementedError), hooks.capture_hidden_states(model, row, hooks.OutputIndices(row, row)):
        pass


def test_pooling_does_not_depend_on_the_chunks() -> None:
    states = torch.arange(12.0).view(6, 2)
    mean, last = PromptPooler("mean", 6), PromptPooler("last", 6)
    for start, stop in ((0, 2), (2, 3), (3, 6)):
        for pool in (mean, last):
            rows = pool.state_positions(start, stop)
            pool.add(states[rows.start : max(rows.start, rows.stop)])

    assert [5.0, 6.0] == np.frombuffer(mean.event().vector, "<f4").tolist()
    assert [10.0, 11.0] == np.frombuffer(last.event().vector, "<f4").tolist()
