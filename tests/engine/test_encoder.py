"""Models with an encoder: in any batch the answers equal `generate` with the same media."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.load.load import LoadedModel
from engine.model.encoder import Encoder
from engine.step.input import StepInput
from engine.types.events import Failed, Finished
from engine.types.request import Media, Request, SamplingParams
from kvcache.cache import Cache
from kvcache.encoder_cache import EncoderEntry
from kvcache.spec import Span
from tests.engine.kit.encoders import KINDS, START, Alone, array, media, prompt, save_encoder_model
from tests.engine.kit.models import CONTEXT, core, load_model
from tests.engine.kit.play import GREEDY, Answer, Job, play, take
from tests.selection import quick

Models = Callable[[str], LoadedModel]
References = Callable[[str], Alone]

every_kind = pytest.mark.parametrize("kind", KINDS)
# Sounds as the keys of a decoder, and images in some layers with masks.
by_kind = pytest.mark.parametrize("kind", quick(("whisper", "mllama"), KINDS))


@pytest.fixture(scope="module")
def kind_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model with an encoder."""
    root = tmp_path_factory.mktemp("encoders")
    return cache(lambda kind: save_encoder_model(kind, root / kind))


@pytest.fixture(scope="module")
def models(kind_folder: Callable[[str], Path]) -> Models:
    """A tiny model as the engine loads it, in float64."""
    return cache(lambda kind: load_model(kind_folder(kind)))


@pytest.fixture(scope="module")
def references(kind_folder: Callable[[str], Path]) -> References:
    """A tiny model in transformers."""
    return cache(lambda kind: Alone(kind, kind_folder(kind)))


def ask(name: str, tokens: tuple[int, ...], one: Media | None, count: int = 8, **fields: Any) -> Request:
    """A greedy request."""
    return Request(name, tokens, **{"sampling": GREEDY, "max_tokens": count, "media": one, **fields})


def mixed(kind: str, number: int) -> Request:
    """One of many requests: three media, prompts with shared prefixes, and for Mllama some without an image."""
    size = number % 4 if kind == "mllama" else 5 + number % 3
    one = media(kind, number % 3, size) if size else None
    return ask(f"{number}", prompt(kind, number % 2, 4 + 3 * number, size), one)


def check(reference: Alone, requests: list[Request], answers: dict[str, Answer]) -> None:
    """Every answer equals that of `generate`."""
    output = {request.id: tuple(answers[request.id].tokens) for request in requests}
    expected = {one.id: reference.greedy(one.prompt, one.media, one.max_tokens or 0) for one in requests}
    assert expected == output
    assert all(isinstance(answers[request.id].end, Finished) for request in requests)


class CountingEncoder(Encoder):
    """An encoder that counts the media that it encodes."""

    encoded = 0

    def encode(self, media: Media) -> EncoderEntry:
        self.encoded += 1
        return super().encode(media)


def counting(loaded: LoadedModel, budget: int | None = None) -> tuple[LoadedModel, CountingEncoder]:
    """The model with a counting encoder, and that encoder; `budget`: bytes of the encoder cache."""
    assert loaded.encoder is not None
    encoder = CountingEncoder(loaded.model, budget_bytes=loaded.encoder.budget_bytes if budget is None else budget)
    # Its construction encodes once, to measure an entry.
    encoder.encoded = 0
    return dataclasses.replace(loaded, encoder=encoder), encoder


def entry_budget(loaded: LoadedModel, entries: float, one: Media) -> int:
    """Bytes of an encoder cache for `entries` of a size."""
    assert loaded.encoder is not None
    return int(entries * loaded.encoder.entry_bytes(one))


@every_kind
@pytest.mark.parametrize("chunk", quick((5,), (1, 5, 64)))
def test_any_batch_equals_separate_runs(kind: str, chunk: int, models: Models, references: References) -> None:
    """With different, equal and no media in one batch, and fewer slots than requests."""
    requests = [mixed(kind, number) for number in range(10)]
    loaded, encoder = counting(models(kind))
    engine = core(loaded, slots=3, chunk=chunk)

    answers = play(engine, [Job(request, at) for at, request in enumerate(requests)])

    check(references(kind), requests, answers)
    assert len({request.media for request in requests if request.media}) == encoder.encoded
    assert 0 == engine.encoder_inputs.store.pinned_bytes


def traffic(kind: str, seed: int) -> list[Job]:
    """Random arrivals and cancels of requests from a small pool, so that media and prefixes repeat."""
    chance = random.Random(seed)
    jobs = []
    for at in range(chance.randint(3, 9)):
        arrives = chance.choice((0, chance.randint(0, 20)))
        leaves = arrives + chance.randint(0, 12) if chance.random() < 0.25 else None
        request = dataclasses.replace(mixed(kind, chance.randrange(12)), id=f"{seed}-{at}")
        jobs.append(Job(request, arrives, leaves))
    return jobs


def run_mix(kind: str, seed: int, loaded: LoadedModel, reference: Alone) -> None:
    """A random mix, sometimes with too few cells, sometimes with an encoder cache for one or two entries."""
    chance, jobs = random.Random(seed + 10_000), traffic(kind, seed)
    most = max((job.request.media for job in jobs if job.request.media), key=lambda one: len(one.arrays[-1][1].data))
    if chance.random() < 0.5:
        loaded, _ = counting(loaded, entry_budget(loaded, chance.choice((1, 1.5, 2.5)), most))
    slots, cells = chance.choice((1, 2, 4, 8)), chance.choice((CONTEXT, 4 * CONTEXT))
    engine = core(loaded, slots=slots, cells=cells, chunk=chance.choice((1, 3, 8, 64)))

    answers = play(engine, jobs)

    for job in jobs:
        request, answer = job.request, answers[job.request.id]
        right = reference.greedy(request.prompt, request.media, 8)
        assert isinstance(answer.end, Finished) or job.leaves is not None, seed
        assert tuple(answer.tokens) == (right if answer.end else right[: len(answer.tokens)]), seed
    assert 0 == engine.encoder_inputs.store.pinned_bytes


@by_kind
def test_any_traffic_equals_separate_runs(kind: str, models: Models, references: References) -> None:
    """Arrivals, cancels, chunks, prefix hits, preemption and a small encoder cache."""
    for seed in range(2):
        run_mix(kind, seed, models(kind), references(kind))


@pytest.mark.slow
@every_kind
def test_a_hundred_mixes_of_every_kind(kind: str, models: Models, references: References) -> None:
    for seed in range(1000, 1100):
        run_mix(kind, seed, models(kind), references(kind))


@by_kind
def test_preemption_does_not_change_the_text(kind: str, models: Models, references: References) -> None:
    """Preempted sequences resume with their media."""
    requests = [mixed(kind, number) for number in range(8)]
    engine = core(models(kind), slots=8, cells=CONTEXT // 2, context=CONTEXT // 2, chunk=16)

    answers = play(engine, [Job(request) for request in requests])

    check(references(kind), requests, answers)
    assert 0 < engine.stats().preemptions_total
    assert 0 == engine.encoder_inputs.store.pinned_bytes


@by_kind
def test_a_prefix_is_reused_with_the_same_media_only(kind: str, models: Models, references: References) -> None:
    """With the same media only the last token is computed; with others all of it."""
    tokens = prompt(kind, 1, 20, images=1)
    size = 1 if kind == "mllama" else 6
    requests = [ask("1", tokens, media(kind, 1, size)), ask("2", tokens, media(kind, 1, size))]
    requests += [ask("3", tokens, media(kind, 2, size)), ask("4", (*tokens, 9), media(kind, 2, size))]
    loaded, encoder = counting(models(kind))
    engine = core(loaded, slots=2, chunk=7)

    answers: dict[str, Answer] = {}
    for request in requests:
        answers |= play(engine, [Job(request)])

    check(references(kind), requests, answers)
    cached = [answers[request.id].started[0].cached_tokens for request in requests]
    assert [0, len(tokens) - 1, 0, len(tokens)] == cached
    assert answers["1"].tokens != answers["3"].tokens
    assert 2 == encoder.encoded


@by_kind
def test_the_same_prompt_with_other_media_has_no_leader(kind: str, models: Models) -> None:
    tokens = prompt(kind, 1, 20, images=1)
    size = 1 if kind == "mllama" else 6
    engine = core(models(kind), slots=3, chunk=64)
    jobs = [Job(ask(f"{at}", tokens, media(kind, seed, size))) for at, seed in enumerate((1, 2, 1))]

    answers = play(engine, jobs)

    ends = [answers[f"{at}"].end for at in range(3)]
    assert [0, 0, len(tokens) - 1] == [end.usage.cached_tokens for end in ends if isinstance(end, Finished)]
    assert answers["0"].tokens == answers["2"].tokens != answers["1"].tokens


@by_kind
def test_a_copied_prefix_equals_a_computed_one(kind: str, models: Models, references: References) -> None:
    """copy_prefix of a running slot at every length, against the logits of transformers."""
    loaded = models(kind)
    assert loaded.encoder is not None
    one = media(kind, 4, 2)
    tokens = prompt(kind, 4, 16, images=2)
    expected = references(kind).logits(tokens, one)
    mask = loaded.encoder.mask(loaded.encoder.encode(one), one, tokens)
    cells = Cache([plan.spec for plan in loaded.layers], slots=2, capacity=32, cells=64, dtype=torch.float64)

    def feed(slot: int, stop: int) -> torch.Tensor:
        span = Span(slot, cells.cached_length(slot), stop - cells.cached_length(slot))
        with cells.forward([span]) as forward:
            return loaded.runner.run(
                StepInput(forward, tokens[span.start : span.stop], [span.length - 1], encoder_masks=[mask])
            ).logits[0]

    feed(0, 5)
    feed(0, len(tokens))
    for length in range(len(tokens)):
        cached_length = cells.copy_prefix(0, 1, length)
        assert cached_length == length
        assert torch.allclose(expected, feed(1, len(tokens)), atol=1e-9), length


@by_kind
def test_the_encoder_cache_keeps_its_budget(kind: str, models: Models, references: References) -> None:
    """Three media in a cache for two entries are encoded in turn, each pinned while it is in use."""
    size = 1 if kind == "mllama" else 6
    requests = [ask(f"{at}", prompt(kind, at, 6, images=1), media(kind, at % 3, size)) for at in range(6)]
    loaded, encoder = counting(models(kind), entry_budget(models(kind), 2.5, requests[0].media))
    engine = core(loaded, slots=4)
    store, most, together = engine.encoder_inputs.store, 0, 0
    for request in requests:
        engine.submit(request)
    answers = {request.id: Answer() for request in requests}
    while engine.busy:
        for name, event in engine.step():
            take(answers[name], event)
        most, together = max(most, store.used_bytes), max(together, engine.stats().running)

    check(references(kind), requests, answers)
    assert most <= store.budget_bytes
    assert (2, 2) == (together, len(store))
    assert 3 < encoder.encoded


@by_kind
def test_a_cancelled_request_unpins_its_entry(kind: str, models: Models) -> None:
    """A running one, and a waiting one with an entry."""
    size = 1 if kind == "mllama" else 6
    requests = [ask(f"{at}", prompt(kind, at, 6, images=1), media(kind, at, size)) for at in range(3)]
    engine = core(models(kind), slots=1)
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.step()
    pinned = engine.encoder_inputs.store.pinned_bytes
    for request in requests:
        engine.cancel(request.id)

    assert pinned > 0
    assert 0 == engine.encoder_inputs.store.pinned_bytes
    assert not engine.busy


class Broken(Encoder):
    """An encoder that fails for media with a certain first number."""

    def encode(self, media: Media) -> EncoderEntry:
        """Raises for the second media."""
        if self.bad is not None and media.digest == self.bad:
            raise RuntimeError("no memory for this")
        return super().encode(media)

    bad: bytes | None = None


def test_decoder_start_tokens_are_found(models: Models) -> None:
    """A decoder without an encoder starts with its prompt."""
    assert [(START,)] * 3 == [models(kind).info.decoder_start_tokens for kind in ("bart", "whisper", "t5")]
    assert () == models("mllama").info.decoder_start_tokens


def test_media_that_fail_the_encoder_fail_one_request(models: Models, references: References) -> None:
    """With a reason; its pin is released, and the others are answered."""
    requests = [ask(f"{at}", prompt("bart", at, 6), media("bart", at)) for at in range(3)]
    encoder = Broken(models("bart").model, budget_bytes=2**20)
    encoder.bad = requests[1].media.digest if requests[1].media else None
    engine = core(dataclasses.replace(models("bart"), encoder=encoder), slots=2)

    answers = play(engine, [Job(request) for request in requests])

    assert Failed("the media could not be encoded (RuntimeError)") == answers["1"].end
    check(references("bart"), [requests[0], requests[2]], answers)
    assert 0 == engine.encoder_inputs.store.pinned_bytes


def test_nonfinite_media_fail_one_request(models: Models, references: References) -> None:
    """A spectrogram of infinities leads to NaN logits."""
    numbers = np.full((4, 24), np.inf, np.float32)
    bad = ask("bad", prompt("whisper", 1, 6), Media.of({"input_features": array(numbers)}))
    good = ask("good", prompt("whisper", 1, 6), media("whisper", 1))

    answers = play(core(models("whisper"), slots=2), [Job(bad), Job(good)])

    assert isinstance(answers["bad"].end, Failed)
    check(references("whisper"), [good], answers)


@pytest.mark.parametrize("kind", ["bart", "whisper", "t5"])
def test_a_full_context_shifts_and_continues(kind: str, models: Models) -> None:
    """The encoder entry is unchanged."""
    engine = core(models(kind), slots=1, context=24)
    request = ask("1", prompt(kind, 1, 20), media(kind, 1), 40, overflow="shift", ignore_eos=True)

    end = play(engine, [Job(request)])["1"].end

    assert isinstance(end, Finished)
    assert (40, True) == (end.usage.completion_tokens, end.usage.context_shifts > 0)


def test_a_full_context_with_images_finishes(models: Models) -> None:
    """Tokens that attend to images cannot be moved."""
    engine = core(models("mllama"), slots=1, context=32)
    request = ask("1", prompt("mllama", 1, 20, 1), media("mllama", 1, 1), 40, overflow="shift", ignore_eos=True)

    end = play(engine, [Job(request)])["1"].end

    assert isinstance(end, Finished)
    assert ("length", 11) == (end.reason, end.usage.completion_tokens)


def test_penalties_skip_image_tokens(models: Models) -> None:
    """Their ids lie outside of the vocabulary and have no logits."""
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    request = ask("1", prompt("mllama", 1, 6, 1), media("mllama", 1, 1), 6, sampling=sampling, ignore_eos=True)

    assert 6 == len(play(core(models("mllama"), slots=1), [Job(request)])["1"].tokens)


@by_kind
def test_encoder_entries_survive_a_restart(kind: str, models: Models, references: References, tmp_path: Path) -> None:
    """In files of the disk cache."""
    requests = [mixed(kind, number) for number in range(3)]
    first_model, first_encoder = counting(models(kind))
    first = core(first_model, disk_cache=str(tmp_path))
    check(references(kind), requests, play(first, [Job(request) for request in requests]))
    while first.flush_when_idle():
        pass
    second_model, second_encoder = counting(models(kind))
    second = core(second_model, disk_cache=str(tmp_path))
    answers = play(second, [Job(request) for request in requests])

    check(references(kind), requests, answers)
    assert 0 < first_encoder.encoded
    assert 0 == second_encoder.encoded


def test_entries_of_uncacheable_requests_end_with_them(models: Models, tmp_path: Path) -> None:
    """Two choices share an entry, which leaves neither memory nor a file."""
    loaded, encoder = counting(models("bart"))
    subject = core(loaded, disk_cache=str(tmp_path))
    fields = {"salt": b"own", "cacheable": False}
    play(subject, [Job(ask(name, prompt("bart", 1, 4), media("bart", 1), **fields)) for name in "ab"])

    assert encoder.encoded == 1
    assert (len(subject.encoder_inputs.store), subject.encoder_inputs.store.used_bytes) == (0, 0)
    assert not subject.flush_when_idle()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_salts_separate_media(models: Models) -> None:
    """Media are encoded again under another salt."""
    one, tokens = media("bart", 1), prompt("bart", 1, 4)
    loaded, encoder = counting(models("bart"))
    subject = core(loaded)
    for name, salt in (("a", b"one"), ("b", b"two"), ("c", b"one")):
        play(subject, [Job(ask(name, tokens, one, salt=salt))])

    assert 2 == encoder.encoded
