"""Validation of media, before a token is computed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.model.encoder import Encoder
from engine.types.array import Array
from engine.types.events import Finished
from engine.types.request import Media, Request
from tests.engine.kit.encoders import KINDS, array, media, prompt, save_encoder_model
from tests.engine.kit.models import CONTEXT, load_model
from tests.engine.kit.play import GREEDY

Encoders = Callable[[str], Encoder]


@pytest.fixture(scope="module")
def kind_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model with an encoder."""
    root = tmp_path_factory.mktemp("encoders")
    return cache(lambda kind: save_encoder_model(kind, root / kind))


@pytest.fixture(scope="module")
def encoders(kind_folder: Callable[[str], Path]) -> Encoders:
    """The encoder of a tiny model."""
    return cache(lambda kind: encoder_of(kind_folder(kind)))


def encoder_of(folder: Path) -> Encoder:
    """The encoder of a model folder."""
    encoder = load_model(folder).encoder
    assert encoder is not None
    return encoder


def ask(name: str, tokens: tuple[int, ...], one: Media | None, count: int = 8) -> Request:
    """A greedy request without an end token."""
    return Request(name, tokens, sampling=GREEDY, max_tokens=count, media=one, ignore_eos=True)


def changed(one: Media, name: str, **fields: object) -> Media:
    """The media with one array changed, and their digest."""
    return Media.of({key: dataclasses.replace(value, **fields) if key == name else value for key, value in one.arrays})


TOKENS, IMAGES = media("bart", 1), media("mllama", 1, 1)
FAR = np.array([3, 4, 999])
REFUSED: dict[str, tuple[str, Media | None, str]] = {
    "none": ("bart", None, "needs media for this: input_ids"),
    "no sound": ("whisper", None, "needs media for this: input_features"),
    "another kind": ("bart", IMAGES, "takes input_ids, not aspect_ratio_ids"),
    "one too many": (
        "bart",
        Media.of({**dict(TOKENS.arrays), "more": array(FAR)}),
        "takes input_ids, not input_ids, more",
    ),
    "one twice": ("bart", dataclasses.replace(TOKENS, arrays=TOKENS.arrays * 2), "takes input_ids"),
    "one missing": ("mllama", Media.of(dict(IMAGES.arrays[:2])), "takes pixel_values"),
    "type": ("bart", changed(TOKENS, "input_ids", dtype="float32"), "input_ids is float32, and must be int64"),
    "axes": ("bart", changed(TOKENS, "input_ids", shape=(1, 7)), r"has the shape \(1, 7\)"),
    "nothing": ("bart", changed(TOKENS, "input_ids", shape=(0,), data=b""), r"has the shape \(0,\)"),
    "negative": ("bart", changed(TOKENS, "input_ids", shape=(-7,)), r"has the shape \(-7,\)"),
    "too long": ("bart", media("bart", 1, CONTEXT + 1), r"has the shape \(129,\)"),
    "short sound": (
        "whisper",
        Media.of({"input_features": array(np.zeros((4, 8), np.float32))}),
        r"must have \(4, 24\)",
    ),
    "too few bytes": ("bart", changed(TOKENS, "input_ids", data=b"12345678"), "has 8 bytes"),
    "unknown token": ("bart", Media.of({"input_ids": array(FAR)}), r"lie in \[0, 271\]"),
    "unequal": ("mllama", changed(IMAGES, "aspect_ratio_ids", shape=(2,), data=bytes(8) * 2), "has the shape"),
    "unknown ratio": ("mllama", changed(IMAGES, "aspect_ratio_ids", data=bytes(8)), r"lie in \[1, 8\]"),
    "digest": ("bart", dataclasses.replace(TOKENS, digest=bytes(32)), "digest is not that of the content"),
    "images": ("mllama", media("mllama", 1, 2), "has 1 image tokens for 2 images"),
    "unseen": ("mllama", None, "needs media for this: pixel_values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_media_are_refused_with_a_reason(case: str, encoders: Encoders) -> None:
    """InvalidRequest names the field `media`."""
    kind, one, reason = REFUSED[case]
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        encoders(kind).check(one, prompt(kind, 1, 6, images=1))

    assert "media" == refusal.value.field


@pytest.mark.parametrize("kind", KINDS)
def test_media_beyond_the_budget_are_refused(kind: str, encoders: Encoders) -> None:
    """The size of an entry is computed from the shapes of its media, and is in the reason."""
    one = media(kind, 1, 1 if kind == "mllama" else 11)
    encoder = encoders(kind)
    size = encoder.encode(one).bytes
    small = Encoder(encoder.model, budget_bytes=size - 1)

    assert size == encoder.entry_bytes(one)
    with pytest.raises(InvalidRequest, match=f"encoded it takes {size} bytes, and all encoded media may take"):
        small.check(one, prompt(kind, 1, 6, images=1))


def test_open_refuses_invalid_media(kind_folder: Callable[[str], Path]) -> None:
    """Valid media pass, with image tokens outside of the vocabulary."""
    asyncio.run(_knock(kind_folder("mllama")))


async def _knock(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder), dtype="float64", context=CONTEXT, slots=1))
    engine.start()
    await engine.wait_ready()
    tokens = prompt("mllama", 1, 6, 1)
    try:
        with pytest.raises(InvalidRequest, match="needs media"):
            async with engine.open(ask("1", tokens, None)):
                pass
        async with engine.open(ask("2", tokens, IMAGES, 3)) as stream:
            events = [event async for event in stream]
        assert isinstance(events[-1], Finished)
    finally:
        engine.close()


def test_a_model_without_an_encoder_refuses_media(folder: Callable[[str], Path]) -> None:

    async def knock() -> None:
        engine = Engine(EngineConfig(model=str(folder("llama")), context=CONTEXT, slots=1))
        engine.start()
        await engine.wait_ready()
        try:
            async with engine.open(ask("1", (1, 2), TOKENS)):
                pass
        finally:
            engine.close()

    with pytest.raises(InvalidRequest, match="no encoder"):
        asyncio.run(knock())


def test_digests_differ_between_media() -> None:
    """By names, types, shapes, numbers, and boundaries between arrays."""
    data = np.arange(4).tobytes()
    some = [
        {"a": Array("int64", (4,), data)},
        {"b": Array("int64", (4,), data)},
        {"a": Array("float64", (4,), data)},
        {"a": Array("int64", (2, 2), data)},
        {"a": Array("int64", (4,), data[::-1])},
        {"a": Array("int64", (2,), data[:16]), "b": Array("int64", (2,), data[16:])},
    ]

    assert len(some) == len({Media.of(arrays).digest for arrays in some})
    assert Media.of(some[5]) == Media.of(dict(reversed(some[5].items())))
