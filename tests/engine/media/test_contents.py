"""Prompts with images: the text equals `generate` in any batch and chunks, with prefix hits, drafts and preemption."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from engine.core import Core
from engine.draft.depth import FixedDepth
from engine.draft.lookup import LookupDrafter
from engine.draft.outputs import OutputStore
from engine.draft.speculation import Speculation
from engine.errors import InvalidRequest
from engine.load.load import LoadedModel
from engine.run.runner import FirstSupporting
from engine.step.content import PromptLayout
from engine.step.input import StepFeatures
from engine.types.content import Content
from engine.types.events import Failed, Finished
from engine.types.request import Request
from engine.validity import check_request
from tests.engine.kit.contents import Prompt
from tests.engine.kit.models import core
from tests.engine.kit.play import Answer, Job, ask, play, take, texts
from tests.engine.kit.served_contents import (
    CONTEXT,
    ContentModel,
    EmbeddingRows,
    RecordingRunner,
    content_model,
    content_request,
    token_contents,
    with_native_step,
    with_token_contents,
)
from tests.selection import quick

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

NAMES = ("llava", "qwen2_vl", "qwen3_vl", "gemma3", "gemma4")
MORE_NAMES = (*NAMES, "qwen2_5_vl", "qwen3_5", "internvl", "mistral3", "glm4v", "voxtral", "lfm2_vl", "idefics3")
# Plain attention, positions of three axes and attention in both directions.
MECHANISMS = ("llava", "qwen3_vl", "gemma3")
# Every chunk with and without drafts, every model once at least.
BATCHES = {
    ("llava", 1, "lookup"),
    ("qwen2_vl", 7, "alone"),
    ("qwen3_vl", 1, "alone"),
    ("qwen3_vl", 64, "lookup"),
    ("gemma3", 7, "lookup"),
    ("gemma4", 64, "alone"),
}
# Longest bidirectional range of the models.
LONGEST = 7
# A target between tokens so short that each slice of an encoding is the least: one module.
SLICES = 0.001
TEXT = tuple(torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(5)).tolist())


@pytest.fixture(scope="module")
def models(loaded: Callable[..., LoadedModel]) -> Callable[[str], ContentModel]:
    return cache(lambda name: content_model(loaded("llama"), name))


@pytest.fixture(scope="module")
def expected(models: Callable[[str], ContentModel]) -> Callable[[str], dict[str, list[int]]]:
    """The answers of `generate`, by request."""

    @cache
    def answers(name: str) -> dict[str, list[int]]:
        model = models(name)
        return {f"{number}": model.expected(prompt) for number, prompt in enumerate(prompts(model))}

    return answers


def prompts(model: ContentModel) -> list[Prompt]:
    """With no image, one, two and the same twice, first and last; and with shared prefixes."""
    first, second, third = model.images
    return [
        model.prompt(1, *TEXT[:5], first, *TEXT[5:12]),
        model.prompt(1, *TEXT[:3], second, *TEXT[20:23], third, *TEXT[3:9]),
        model.prompt(1, *TEXT[:19]),
        model.prompt(1, *TEXT[:5], first, *TEXT[5:12], *TEXT[30:34]),
        model.prompt(1, *TEXT[:5], second, *TEXT[5:12]),
        model.prompt(1, *TEXT[:5], first, *TEXT[5:7], first, *TEXT[1:4]),
        model.prompt(1, *TEXT[:5], first),
        model.prompt(third, *TEXT[:6]),
    ]


def requests(model: ContentModel) -> list[Request]:
    return [content_request(f"{number}", prompt) for number, prompt in enumerate(prompts(model))]


def lookup() -> Speculation:
    """Drafts of up to four tokens from the text."""
    return Speculation(LookupDrafter(OutputStore(4096)), None, FixedDepth(4), lambda: 0.0)


@pytest.mark.parametrize(
    ("name", "chunk", "drafts"), quick(BATCHES, product(MORE_NAMES, (1, 7, 64), ("alone", "lookup")))
)
def test_any_batch_equals_generate(
    models: Callable[[str], ContentModel],
    expected: Callable[[str], dict[str, list[int]]],
    name: str,
    chunk: int,
    drafts: str,
) -> None:
    """With neighbours of text, in chunks that end inside of images, and with prefixes of each other."""
    model = models(name)
    chance = random.Random(chunk)
    longest = _longest_range(model)
    speculation = lookup() if drafts == "lookup" else None
    engine = core(model.loaded, slots=4, context=CONTEXT, chunk=max(chunk, longest), speculation=speculation)
    asked = requests(model)
    chance.shuffle(asked)

    answers = play(engine, [Job(request, chance.randint(0, 20)) for request in asked])

    assert texts(answers) == expected(name)
    assert engine.stats().prefix_hits_total > 0
    assert engine.content_inputs.store.pinned_bytes == 0


def _longest_range(model: ContentModel) -> int:
    ranges = [model.encoder.layout(prompt.tokens, prompt.contents).bidirectional for prompt in prompts(model)]
    return max((stop - start for of_prompt in ranges for start, stop in of_prompt), default=1)


@pytest.mark.parametrize("name", quick(MECHANISMS[1:], NAMES))
def test_preemption_does_not_change_the_text(models: Callable[[str], ContentModel], name: str) -> None:
    """With few cells; contents are encoded again where the cells of their tokens are gone."""
    model, count = models(name), 24
    asked = {f"{number}": prompt for number, prompt in enumerate(prompts(model)[:4])}
    context = max(len(prompt.tokens) for prompt in asked.values()) + count
    engine = core(model.loaded, slots=4, context=context, cells=context + 20, chunk=16, speculation=lookup())

    # Different salts prevent shared prefixes, so that cells run out.
    jobs = [Job(content_request(number, prompt, count, salt=number.encode())) for number, prompt in asked.items()]
    answers = play(engine, jobs)

    assert texts(answers) == {number: model.expected(prompt, count) for number, prompt in asked.items()}
    assert engine.stats().preemptions_total > 0
    assert engine.content_inputs.store.pinned_bytes == 0


@pytest.mark.parametrize("name", quick(MECHANISMS[1:], NAMES))
def test_a_shift_moves_images(models: Callable[[str], ContentModel], name: str) -> None:
    """No image is dropped, and the text is the same in any chunks and with drafts."""
    model = models(name)
    asked = [replace(request, max_tokens=70, overflow="shift", keep=4) for request in requests(model)[:3]]

    def answers(**settings: object) -> dict[str, list[int]]:
        ended = play(core(model.loaded, slots=3, context=72, **settings), [Job(request) for request in asked])
        assert all(
            isinstance(answer.end, Finished) and answer.end.usage.context_shifts > 0 for answer in ended.values()
        )
        return texts(ended)

    whole = answers(chunk=64)

    assert answers(chunk=_longest_range(model) + 6) == whole
    assert answers(chunk=64, speculation=lookup()) == whole


def _play(engine: Core, prompt: Prompt, **settings: object) -> Answer:
    return play(engine, [Job(content_request("a", prompt, **settings))])["a"]


def _cached(answer: Answer) -> int:
    assert isinstance(answer.end, Finished)
    return answer.end.usage.cached_tokens


def test_a_prefix_over_an_image_runs_no_encoder(models: Callable[[str], ContentModel]) -> None:
    model = models("qwen2_vl")
    engine = core(model.loaded, context=CONTEXT)
    first, _, _, longer, other, *_ = prompts(model)
    _play(engine, first)
    model.encoder.encoded.clear()

    answer = _play(engine, longer)

    assert _cached(answer) == len(first.tokens)
    assert model.encoder.encoded == []
    assert answer.tokens == model.expected(longer)
    # Another image has the same tokens.
    assert _cached(_play(engine, other)) == other.contents[0].start


def test_a_prefix_that_ends_inside_an_image_continues_there(models: Callable[[str], ContentModel]) -> None:
    """With the entry in memory, or encoded again."""
    model = models("qwen3_vl")
    prompt = prompts(model)[0]
    content = prompt.contents[0]
    length = content.start + 3
    for _ in range(2):
        engine = core(model.loaded, context=CONTEXT, chunk=content.start + 3)
        engine.submit(content_request("cut", prompt))
        while engine.stats().cells_used + engine.stats().cells_cached <= length:
            engine.step()
        engine.cancel("cut")

        answer = _play(engine, prompt)

        assert content.start < _cached(answer) < content.stop
        assert answer.tokens == model.expected(prompt)


@pytest.mark.parametrize("name", quick(MECHANISMS[:2], MORE_NAMES))
def test_entries_survive_a_restart(models: Callable[[str], ContentModel], name: str, tmp_path: Path) -> None:
    """In files of the disk cache, under the salt of their owner: other prompts do not run the tower again."""
    model, (image, *_) = models(name), models(name).images
    asked = [model.prompt(1, *TEXT[:5], image, *TEXT[5:9]), model.prompt(1, *TEXT[10:14], image, *TEXT[6:9])]
    first = core(model.loaded, disk_cache=str(tmp_path))
    play(first, [Job(content_request("first", asked[0], salt=b"one"))])
    while first.flush_when_idle():
        pass

    model.encoder.encoded.clear()
    second = core(model.loaded, disk_cache=str(tmp_path))
    answers = play(second, [Job(content_request("same", asked[1], salt=b"one"))])
    encoded = len(model.encoder.encoded)
    answers |= play(second, [Job(content_request("other", asked[1], salt=b"two"))])

    counts = second.stats().encoders[0]
    assert encoded == 0
    assert (counts.kind, counts.encodings_total, counts.memory_hits_total, counts.disk_hits_total) == (
        model.family.kind,
        1,
        0,
        1,
    )
    assert counts.seconds_total > 0
    assert texts(answers) == dict.fromkeys(("same", "other"), model.expected(asked[1]))
    assert len(model.encoder.encoded) == 1
    assert second.content_inputs.store.pinned_bytes == 0


def test_entries_of_uncacheable_requests_are_not_written(models: Callable[[str], ContentModel], tmp_path: Path) -> None:
    model = models("qwen3_vl")
    subject = core(model.loaded, disk_cache=str(tmp_path))
    prompt = model.prompt(1, *TEXT[:5], model.images[0], *TEXT[5:9])
    play(subject, [Job(content_request("1", prompt, salt=b"one", cacheable=False))])

    assert not subject.flush_when_idle()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_image_of_many_requests_is_encoded_once(models: Callable[[str], ContentModel]) -> None:
    model = models("llava")
    engine = core(model.loaded, slots=6, context=CONTEXT)
    first = model.images[0]
    asked = [model.prompt(1, *TEXT[number : number + 4], first, *TEXT[9:12]) for number in range(12)]
    model.encoder.encoded.clear()

    answers = play(engine, [Job(content_request(f"{number}", prompt)) for number, prompt in enumerate(asked)])

    assert len(model.encoder.encoded) == 1
    assert texts(answers) == {f"{number}": model.expected(prompt) for number, prompt in enumerate(asked)}


def test_an_image_of_64_requests_is_encoded_once_in_slices(models: Callable[[str], ContentModel]) -> None:
    model = models("llava")
    engine = core(model.loaded, slots=64, context=CONTEXT, itl_target_ms=SLICES)
    first = model.images[0]
    asked = {f"{number}": model.prompt(1, number + 5, *TEXT[3:7], first, *TEXT[9:12]) for number in range(64)}
    model.encoder.encoded.clear()

    answers = play(
        engine, [Job(content_request(name, prompt), number) for number, (name, prompt) in enumerate(asked.items())]
    )

    assert len(model.encoder.encoded) == 1
    assert texts(answers) == {name: model.expected(prompt) for name, prompt in asked.items()}


def _streams(count: int) -> list[Request]:
    """Of text that is decoded in every step."""
    return [ask(f"text {number}", TEXT[number : number + 4], 150, ignore_eos=True) for number in range(count)]


@pytest.mark.parametrize("name", quick(MECHANISMS[:2], MECHANISMS))
def test_streams_decode_beside_encodings(models: Callable[[str], ContentModel], name: str) -> None:
    """Each of eight streams has a token in every step but those with tokens of images, in slices of one module."""
    model = models(name)
    engine = core(model.loaded, slots=9, context=CONTEXT, itl_target_ms=SLICES)
    prompt = prompts(model)[1]
    streams = _streams(8)
    answers = {request.id: Answer() for request in (*streams, content_request("images", prompt))}
    for request in streams:
        engine.submit(request)
    for _ in range(20):
        _step(engine, answers)
    engine.submit(content_request("images", prompt))

    tokens = []
    while not answers["images"].tokens:
        tokens.append(_step(engine, answers))

    # Two images of many modules; a step with tokens of images has no other tokens.
    assert len(tokens) > 20
    assert all(max(pair) >= len(streams) for pair in pairwise(tokens))
    while engine.busy:
        _step(engine, answers)
    assert answers["images"].tokens == model.expected(prompt)


def _step(engine: Core, answers: dict[str, Answer]) -> int:
    """The number of tokens that the step generated."""
    before = engine.stats().generated_tokens_total
    for id, event in engine.step():
        take(answers[id], event)
    return engine.stats().generated_tokens_total - before


def _begin_encoding(model: ContentModel, **settings: object) -> Core:
    """A core in the middle of an encoding, beside a stream."""
    engine = core(model.loaded, slots=9, context=CONTEXT, itl_target_ms=SLICES)
    engine.submit(_streams(1)[0])
    for _ in range(3):
        engine.step()
    model.encoder.encoded.clear()
    engine.submit(content_request("images", prompts(model)[1], **settings))
    while not model.encoder.encoded:
        engine.step()
    return engine


def test_an_encoding_that_no_request_needs_ends(models: Callable[[str], ContentModel]) -> None:
    model, threads = models("llava"), threading.active_count()
    engine = _begin_encoding(model)
    assert threading.active_count() == threads + 1

    engine.cancel("images")
    engine.step()

    assert threading.active_count() == threads
    assert len(engine.content_inputs.store) == 0


def test_an_encoding_ends_with_the_last_request(models: Callable[[str], ContentModel]) -> None:
    model, threads = models("llava"), threading.active_count()
    engine = _begin_encoding(model)

    for request in ("images", "text 0"):
        engine.cancel(request)

    assert not engine.busy
    assert threading.active_count() == threads


def test_an_encoding_ends_with_its_engine(models: Callable[[str], ContentModel]) -> None:
    model, threads = models("llava"), threading.active_count()
    engine = _begin_encoding(model)

    engine.close()

    assert threading.active_count() == threads


def test_a_failing_encoding_in_slices_fails_all_that_need_it(models: Callable[[str], ContentModel]) -> None:
    model, threads = models("llava"), threading.active_count()
    model.encoder.broken.add(model.images[1].content.digest)
    engine = core(model.loaded, slots=9, context=CONTEXT, itl_target_ms=SLICES)

    answers = play(engine, [*map(Job, _streams(2)), *map(Job, requests(model))])
    model.encoder.broken.clear()

    reason = "an image or a sound could not be encoded (RuntimeError)"
    assert {name for name, answer in answers.items() if answer.end == Failed(reason)} == {"1", "4"}
    assert threading.active_count() == threads


def test_owners_take_turns(models: Callable[[str], ContentModel]) -> None:
    """The only image of an owner is encoded before the second one of an earlier owner."""
    model = models("llava")
    engine = core(model.loaded, slots=9, context=CONTEXT)
    first, second, third = model.images
    model.encoder.encoded.clear()
    asked = [("a", "one", first), ("b", "one", second), ("c", "other", third)]

    jobs = [
        Job(content_request(id, model.prompt(1, number + 5, image, 9), owner=owner))
        for number, (id, owner, image) in enumerate(asked)
    ]
    play(engine, jobs)

    assert model.encoder.encoded == [image.content.digest for image in (first, third, second)]


def test_another_salt_encodes_again(models: Callable[[str], ContentModel]) -> None:
    """Else the time of an answer would show whether another owner sent the same image."""
    model = models("llava")
    engine = core(model.loaded, context=CONTEXT)
    prompt = prompts(model)[0]
    model.encoder.encoded.clear()

    for salt in (b"one", b"two", b"one"):
        _play(engine, prompt, salt=salt)

    assert len(model.encoder.encoded) == 2


def test_an_uncached_request_leaves_no_entry(models: Callable[[str], ContentModel]) -> None:
    model = models("llava")
    engine = core(model.loaded, context=CONTEXT)

    _play(engine, prompts(model)[1], salt=b"alone", cacheable=False)

    assert len(engine.content_inputs.store) == 0


def test_contents_that_do_not_fit_together_are_encoded_in_turns(
    models: Callable[[str], ContentModel], expected: Callable[[str], dict[str, list[int]]]
) -> None:
    model = models("qwen2_vl")
    engine = core(model.loaded, context=CONTEXT, chunk=5)
    largest = max(model.encoder.entry_bytes(content) for prompt in prompts(model) for content in prompt.contents)
    engine.content_inputs.store.budget_bytes = largest * 3 // 2

    answers = play(engine, [Job(request) for request in requests(model)])

    assert texts(answers) == expected("qwen2_vl")
    assert engine.content_inputs.store.used_bytes <= largest * 3 // 2


@pytest.mark.parametrize("steps", quick((1, 3, 6), range(1, 7)))
def test_a_cancelled_request_pins_nothing(models: Callable[[str], ContentModel], steps: int) -> None:
    model = models("llava")
    engine = core(model.loaded, context=CONTEXT, chunk=3)

    play(engine, [Job(content_request("a", prompts(model)[1]), leaves=steps)])

    assert engine.content_inputs.store.pinned_bytes == 0


def test_a_failing_encoder_fails_its_own_request(
    models: Callable[[str], ContentModel], expected: Callable[[str], dict[str, list[int]]]
) -> None:
    model = models("llava")
    engine = core(model.loaded, context=CONTEXT)
    model.encoder.broken.add(model.images[1].content.digest)

    answers = play(engine, [Job(request) for request in requests(model)])
    model.encoder.broken.clear()

    failed = {name for name, answer in answers.items() if isinstance(answer.end, Failed)}
    assert failed == {"1", "4"}
    assert all(answers[name].tokens == tokens for name, tokens in expected("llava").items() if name not in failed)


@pytest.mark.parametrize("ranges", [((1, 9),), ((3, 5), (2, 4)), ((2, 2),), ((-1, 2),)])
def test_contents_outside_of_the_prompt_or_out_of_order_are_refused(
    loaded: Callable[..., LoadedModel], ranges: tuple[tuple[int, int], ...]
) -> None:
    request = ask("a", range(8), contents=token_contents(range(8), *ranges))

    with pytest.raises(InvalidRequest, match="not after the others in the prompt") as error:
        check_request(request, with_token_contents(loaded("llama")), drafters=(), chunk=64)

    assert error.value.field == "contents"


def test_contents_larger_than_the_memory_of_all_are_refused(models: Callable[[str], ContentModel]) -> None:
    model = models("llava")
    small = replace(model.loaded, content_encoder=EmbeddingRows(model.loaded.model, budget_bytes=100))

    with pytest.raises(InvalidRequest, match="all may take 100"):
        check_request(requests(model)[0], small, drafters=(), chunk=64)


def test_tokens_of_contents_are_not_scored(models: Callable[[str], ContentModel]) -> None:
    model = models("llava")
    request = replace(requests(model)[0], score_from=3)

    with pytest.raises(InvalidRequest, match="cannot be scored"):
        check_request(request, model.loaded, drafters=(), chunk=64)


def test_a_range_longer_than_a_step_is_refused(loaded: Callable[..., LoadedModel]) -> None:
    request = ask("a", range(40), contents=token_contents(range(40), (2, 30)))

    reason = "28 tokens of an image attend to each other, and a step computes at most 16 tokens"
    with pytest.raises(InvalidRequest, match=reason):
        check_request(request, with_token_contents(loaded("llama")), drafters=(), chunk=16)


def test_the_chunk_computes_the_longest_range(
    models: Callable[[str], ContentModel], expected: Callable[[str], dict[str, list[int]]]
) -> None:
    model = models("gemma3")
    engine = core(model.loaded, context=CONTEXT, chunk=2)

    answers = play(engine, [Job(request) for request in requests(model)])

    assert model.encoder.longest_range > 2
    assert texts(answers) == expected("gemma3")


class RefusingEncoder(EmbeddingRows):
    """Has no positions for any prompt with contents, as Qwen2-VL for images without a token between them."""

    def layout(self, tokens: Sequence[int], contents: Sequence[Content]) -> PromptLayout:
        raise RuntimeError("shape mismatch")


def test_an_order_of_contents_that_the_model_refuses_fails_its_request(models: Callable[[str], ContentModel]) -> None:
    """Not the requests beside it; a retry would fail, too."""
    model = models("llava")
    engine = core(replace(model.loaded, content_encoder=RefusingEncoder(model.loaded.model)), context=CONTEXT)

    answers = play(engine, [Job(request) for request in requests(model)[1:3]])

    reason = "the model refuses this order of texts, images and sounds (RuntimeError)"
    assert answers["1"].end == Failed(reason, caused_by_request=True)
    assert isinstance(answers["2"].end, Finished)


class TextRunner(RecordingRunner):
    """A runner of text alone."""

    def supports(self, features: StepFeatures) -> str | None:
        return "text alone" if features.contents else super().supports(features)


@pytest.mark.parametrize("text_alone", [False, True])
def test_contents_and_text_are_in_one_step_where_one_runner_computes_both(
    models: Callable[[str], ContentModel], *, text_alone: bool
) -> None:
    """Else a faster runner of text would round otherwise beside contents."""
    model = models("qwen2_vl")
    packed = RecordingRunner(model.loaded.runner)
    text = TextRunner(model.loaded.runner)
    runner = FirstSupporting((text, packed)) if text_alone else packed
    engine = core(replace(model.loaded, runner=runner), context=CONTEXT, chunk=5)

    answers = play(engine, [Job(request, number) for number, request in enumerate(requests(model))])

    counts = [
        (sum(rows.batch_stop - rows.batch_start for rows in step.embeddings), len(step.tokens))
        for step in (*text.steps, *packed.steps)
    ]
    assert texts(answers) == {f"{number}": model.expected(prompt) for number, prompt in enumerate(prompts(model))}
    assert {contents < tokens for contents, tokens in counts if contents} == {not text_alone}


@pytest.mark.parametrize("name", quick(MECHANISMS, MORE_NAMES))
def test_text_beside_and_after_images_runs_natively(loaded: Callable[..., LoadedModel], name: str) -> None:
    """At the positions that the images leave; so do tokens of contents that have rows and positions only."""
    model = content_model(loaded("llama", "float32"), name, torch.float32)
    served = with_native_step(model)
    assert isinstance(served.runner, FirstSupporting)
    native, packed = (RecordingRunner(runner) for runner in served.runner.runners)
    served.runner.runners = (native, packed)

    answers = play(core(served, context=CONTEXT, chunk=16, speculation=lookup()), [Job(r) for r in requests(model)])

    assert texts(answers) == {f"{number}": model.expected(prompt) for number, prompt in enumerate(prompts(model))}
    assert all(step.embeddings for step in packed.steps)
    assert native.steps
    # Images of Gemma attend to later tokens.
    is_native = name not in ("gemma3", "gemma4")
    assert bool(packed.steps) == (not is_native)
    assert any(step.embeddings for step in native.steps) == is_native
    assert any(step.positions is not None for step in native.steps) == name.startswith(("qwen", "glm"))


@pytest.mark.parametrize("name", ["llava", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_native_bits_do_not_depend_on_contents_in_the_step(loaded: Callable[..., LoadedModel], name: str) -> None:
    """Of texts and of images, alone and beside each other."""
    model = content_model(loaded("llama", "float32"), name, torch.float32)
    served = with_native_step(model)
    scored = [replace(request, logprobs=2) for request in requests(model)]

    together = play(core(served, context=CONTEXT, chunk=16), [Job(request) for request in scored])

    for request in scored:
        alone = play(core(served, context=CONTEXT, chunk=16), [Job(request)])
        assert alone[request.id].logprobs == together[request.id].logprobs
