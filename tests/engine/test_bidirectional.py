"""Ranges of tokens that attend to each other, as image tokens in Gemma 3: exact in any batch and any chunks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache as memory
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

from engine.core import Core
from engine.draft.depth import FixedDepth
from engine.draft.lookup import LookupDrafter
from engine.draft.outputs import OutputStore
from engine.draft.speculation import Speculation
from engine.load.load import LoadedModel
from engine.run.sequential import SequentialRunner
from engine.step.input import StepInput
from engine.types.events import Finished
from engine.types.request import Request
from kvcache.cache import Cache
from kvcache.errors import BadSpan
from kvcache.spec import Span
from tests.engine.kit.models import core
from tests.engine.kit.play import Answer, Job, ask, play
from tests.engine.kit.served_contents import token_contents, with_token_contents
from tests.selection import quick

# Longer than the window of 8: its first tokens do not attend to all of it.
RANGE = (9, 21)
LENGTH = 30
PROMPT = tuple(torch.randint(3, 250, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist())
OTHER = PROMPT[::-1]


@pytest.fixture
def model(loaded: Callable[..., LoadedModel]) -> LoadedModel:
    """A full and a sliding-window layer, in float64."""
    return with_token_contents(loaded("gemma3"))


def alone(model: LoadedModel, tokens: tuple[int, ...], *ranges: tuple[int, int]) -> Tensor:
    """The last logits of transformers, with its masks for image tokens."""
    kinds = torch.zeros(1, len(tokens), dtype=torch.long)
    for mutual in ranges:
        kinds[:, slice(*mutual)] = 1
    config = model.model.config
    way = config._attn_implementation
    model.model.set_attn_implementation("eager")
    with torch.inference_mode():
        masks = create_masks_for_vision_model(
            config=config,
            inputs_embeds=torch.zeros(1, len(tokens), 1, dtype=torch.float64),
            attention_mask=None,
            past_key_values=None,
            position_ids=torch.arange(len(tokens))[None],
            block_sequence_ids=get_block_sequence_ids_for_mask(kinds),
        )
        logits: Tensor = model.model(input_ids=torch.tensor([tokens]), attention_mask=masks, use_cache=False).logits
    model.model.set_attn_implementation(way)
    return logits[0, -1]


def cache(model: LoadedModel) -> Cache:
    """An empty cache."""
    specs = [plan.spec for plan in model.layers]
    return Cache(specs, slots=3, capacity=2 * LENGTH, cells=6 * LENGTH, dtype=torch.float64)


def feed(model: LoadedModel, cache: Cache, *parts: tuple[int, tuple[int, ...], int]) -> list[Tensor]:
    """One forward of (slot, tokens, length); a range inside the span is bidirectional in slots 0 and 1."""
    spans = []
    for slot, _, length in parts:
        start = cache.cached_length(slot)
        spans.append(Span(slot, start, length - start, (RANGE,) if slot < 2 and start <= RANGE[0] < length else ()))
    rows = [
        token for span, (_, tokens, _) in zip(spans, parts, strict=True) for token in tokens[span.start : span.stop]
    ]
    wanted = (torch.tensor([span.length for span in spans]).cumsum(0) - 1).tolist()
    with cache.forward(spans) as forward:
        return list(model.runner.run(StepInput(forward, rows, wanted)).logits)


@pytest.mark.parametrize("stops", [(30,), (9, 21, 30), (4, 25, 30), (9, 22, 23, 30), (1, 9, 21, 22, 30)])
def test_chunks_around_a_range_equal_one_forward(model: LoadedModel, stops: tuple[int, ...]) -> None:
    """The logits equal transformers."""
    memory = cache(model)
    for stop in stops:
        rows = feed(model, memory, (0, PROMPT, stop), (2, OTHER, stop))

    assert torch.allclose(alone(model, PROMPT, RANGE), rows[0], rtol=0, atol=1e-5)
    assert torch.allclose(alone(model, OTHER), rows[1], rtol=0, atol=1e-5)


def test_the_range_changes_the_output(model: LoadedModel) -> None:
    """Compared with causal attention."""
    assert not torch.allclose(alone(model, PROMPT, RANGE), alone(model, PROMPT), atol=1e-3)


@pytest.mark.parametrize("length", [5, 9, 21, 24, 29])
def test_a_copied_prefix_continues_around_a_range(model: LoadedModel, length: int) -> None:
    """A slot with the tokens before or after the range gets the same logits."""
    memory = cache(model)
    for stop in (9, 21, 30):
        feed(model, memory, (0, PROMPT, stop))
    cached_length = memory.copy_prefix(0, 1, length)
    if RANGE[0] < cached_length < RANGE[1]:
        cached_length = memory.rewind(1, RANGE[0])

    row = feed(model, memory, (1, PROMPT, LENGTH))[0]

    assert torch.allclose(alone(model, PROMPT, RANGE), row, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mutual", [(3, 5), (8, 11), (9, 9), (0, 20)])
def test_a_span_holds_whole_ranges(model: LoadedModel, mutual: tuple[int, int]) -> None:
    """A range that is empty or crosses the span is refused, and the cache is unchanged."""
    memory = cache(model)
    feed(model, memory, (0, PROMPT, 4))

    with pytest.raises(BadSpan), memory.forward([Span(0, 4, 6, (mutual,))]):
        pass

    assert 4 == memory.cached_length(0)


STEM, IMAGE, TAIL = PROMPT[:9], PROMPT[9:21], PROMPT[21:]
CONTEXT, COUNT = 64, 10


def requests(longest: int) -> list[Request]:
    """Prompts with shared prefixes and ranges of several lengths and positions, and one without."""
    image = IMAGE[:longest]
    stop = 9 + len(image)
    prompts = [
        ((*STEM, *image, *TAIL), ((9, stop),)),
        ((*STEM, *image, *TAIL[:4], *STEM), ((9, stop),)),
        ((*STEM, *image, *TAIL), ()),
        ((*STEM, *image, *TAIL), ((9, 9 + (len(image) + 1) // 2),)),
        ((*STEM, *image), ((9, stop),)),
        ((*STEM, *image, *TAIL, *image, *TAIL[:2]), ((9, stop), (stop + 9, stop + 9 + len(image)))),
        ((*STEM[:5], *image, *STEM), ((5, 5 + len(image)),)),
        ((*image, *STEM), ((0, len(image)),)),
    ]
    return [
        ask(f"{at}", tokens, COUNT, contents=token_contents(tokens, *ranges), ignore_eos=True)
        for at, (tokens, ranges) in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def expected_tokens(loaded: Callable[..., LoadedModel]) -> Callable[[Request], list[int]]:
    """The answer of transformers, each token computed from the whole text."""

    @memory
    def greedy(prompt: tuple[int, ...], mutual: tuple[tuple[int, int], ...]) -> list[int]:
        tokens = list(prompt)
        for _ in range(COUNT):
            tokens.append(int(alone(loaded("gemma3"), tuple(tokens), *mutual).argmax()))
        return tokens[len(prompt) :]

    return lambda request: greedy(request.prompt, tuple((content.start, content.stop) for content in request.contents))


def lookup() -> Speculation:
    """Drafts of up to four tokens from the text."""
    return Speculation(LookupDrafter(OutputStore(4096)), None, FixedDepth(4), lambda: 0.0)


@pytest.mark.parametrize(
    ("chunk", "drafts"), quick([(7, "alone"), (13, "lookup")], product((1, 7, 12, 13, 64), ("alone", "lookup")))
)
def test_any_mix_equals_transformers(
    model: LoadedModel,
    expected_tokens: Callable[[Request], list[int]],
    chunk: int,
    drafts: str,
) -> None:
    """In any batch, with shared prefixes."""
    chance = random.Random(chunk)
    speculation = lookup() if drafts == "lookup" else None
    engine = core(model, slots=4, context=CONTEXT, chunk=chunk, speculation=speculation)
    asked = requests(min(chunk, len(IMAGE)))
    chance.shuffle(asked)

    answers = play(engine, [Job(request, chance.randint(0, 20)) for request in asked])

    assert {request.id: expected_tokens(request) for request in asked} == {
        name: each.tokens for name, each in answers.items()
    }


@pytest.mark.parametrize("chunk", quick((12,), (12, 64)))
def test_preemption_does_not_change_the_text(
    model: LoadedModel, expected_tokens: Callable[[Request], list[int]], chunk: int
) -> None:
    """With too few cells."""
    engine = core(model, slots=4, context=CONTEXT, cells=CONTEXT, chunk=chunk, speculation=lookup())
    # Different salts prevent shared prefixes, so that cells run out.
    asked = [replace(request, salt=request.id.encode()) for request in requests(len(IMAGE))]

    answers = play(engine, [Job(request) for request in asked])

    assert {request.id: expected_tokens(request) for request in asked} == {
        name: each.tokens for name, each in answers.items()
    }
    assert engine.stats().preemptions_total > 0


def found(engine: Core, request: Request) -> int:
    """The cached tokens of a prompt."""
    answer = play(engine, [Job(request)])[request.id]
    assert isinstance(answer.end, Finished)
    return answer.end.usage.cached_tokens


def test_a_range_is_reused_whole_or_not_at_all(model: LoadedModel) -> None:
    """With the tokens after it; not with another extent of the same tokens, or none."""
    engine = core(model, slots=4, context=CONTEXT)
    first, longer, plain, shorter, ending, twice, *_ = requests(len(IMAGE))

    assert 0 == found(engine, first)
    assert 25 == found(engine, longer)
    assert 9 == found(engine, plain)
    assert 9 == found(engine, shorter)
    assert 9 == found(engine, ending)  # its last token must be computed, and so must the whole range
    assert 30 == found(engine, twice)
    assert 29 == found(engine, first)


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_a_shift_moves_a_range(loaded: Callable[..., LoadedModel], family: str) -> None:
    """A context shift drops no range, in any chunks, preempted or not."""
    asked = [
        ask(f"{at}", prompt, 60, contents=token_contents(prompt, (20, 32)), ignore_eos=True, overflow="shift", keep=4)
        for at, prompt in enumerate([(*STEM, *TAIL, *OTHER[:2], *IMAGE), (*TAIL, *STEM, *OTHER[:2], *IMAGE)])
    ]

    def answers(**settings: int) -> dict[str, list[int]]:
        engine = core(with_token_contents(loaded(family)), slots=2, context=48, **settings)
        ended = play(engine, [Job(request) for request in asked])
        assert all(isinstance(each.end, Finished) and each.end.usage.context_shifts > 1 for each in ended.values())
        return {name: each.tokens for name, each in ended.items()}

    right = answers(chunk=64)

    assert right == answers(chunk=13)
    assert right == answers(chunk=12, cells=50)


def test_a_sequential_runner_refuses_ranges(loaded: Callable[..., LoadedModel]) -> None:
    """With the masks of transformers a range would have no effect."""
    llama = loaded("llama")
    runner = SequentialRunner(llama.model)
    engine = core(with_token_contents(replace(llama, runner=runner)), slots=1, context=CONTEXT)

    answer: Answer = play(engine, [Job(requests(4)[0])])["0"]

    assert not isinstance(answer.end, Finished)


@pytest.mark.parametrize("family", quick(("qwen3_next", "deepseek_v3"), ("qwen3_next", "llama4", "deepseek_v3")))
def test_ranges_are_exact_in_every_kind_of_cache(loaded: Callable[..., LoadedModel], family: str) -> None:
    """With recurrent states, chunked attention and latents, any batch equals separate runs."""
    asked = [replace(request, checkpoints=(5, 9, 12, 22)) for request in requests(len(IMAGE))]
    right = {
        each.id: play(core(with_token_contents(loaded(family)), slots=1, context=CONTEXT), [Job(each)])[each.id].tokens
        for each in asked
    }

    engine = core(
        with_token_contents(loaded(family)), slots=4, context=CONTEXT, chunk=13, checkpoint=4, speculation=lookup()
    )
    answers = play(engine, [Job(request, 2 * at) for at, request in enumerate(asked)])

    assert right == {name: each.tokens for name, each in answers.items()}
    assert engine.stats().prefix_hits_total > 3
