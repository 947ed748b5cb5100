"""Adapters with a draft model, with MTP heads and with the disk cache: each text is PEFT's alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.types.events import Started
from engine.types.request import Request
from tests.engine.draft.mtp_models import agree, save_headed
from tests.engine.kit.adapters import LINEAR, AdaptedReference, change_weights, save_adapter
from tests.engine.kit.play import ask
from tests.engine.test_engine import answer, run_with_engine, tokens

pytestmark = pytest.mark.usefixtures("one_thread")

Folder = Callable[[str], Path]
NAMES, TOKENS = ("", "first", "second"), 16
PROMPT = tuple(range(30, 94))


@pytest.fixture
def adapters(folder: Folder, tmp_path: Path) -> dict[str, Path]:
    """Two adapters of different ranks, by name."""
    return {
        name: save_adapter(folder("llama"), tmp_path / name, {"r": 4 * seed, "target_modules": LINEAR}, seed)
        for seed, name in enumerate(NAMES)
        if name
    }


def expected(folder: Path, adapters: dict[str, Path], name: str, dtype: torch.dtype = torch.float64) -> list[int]:
    """PEFT's tokens alone."""
    return AdaptedReference(folder, adapters.get(name), dtype).greedy(PROMPT, TOKENS)


def lora(adapters: dict[str, Path]) -> tuple[str, ...]:
    return tuple(f"{name}={path}" for name, path in adapters.items())


def asked(name: str) -> Request:
    return ask(name or "base", PROMPT, TOKENS, adapter=name, ignore_eos=True)


def test_a_draft_model_never_adapts_and_the_texts_are_those_of_peft(folder: Folder, adapters: dict[str, Path]) -> None:
    """The model drafts for itself: drafts for the base are accepted, those for an adapter less often."""
    path, accepted = folder("llama"), dict[str, tuple[int, int]]()

    async def story(engine: Engine) -> None:
        for name in NAMES:
            before = _drafts(engine)
            for turn in range(2):
                request = ask(f"{name} {turn}", PROMPT, TOKENS, adapter=name, ignore_eos=True)
                assert tokens(await answer(engine, request)) == expected(path, adapters, name), name
            after = _drafts(engine)
            accepted[name] = after[0] - before[0], after[1] - before[1]

    run_with_engine(path, story, slots=2, lora=lora(adapters), draft_model=str(path), draft_tokens=3, drafter="model")
    tried, right = accepted[""]
    assert 0 < right <= tried
    base_rate = right / tried
    for name in NAMES[1:]:
        tried, right = accepted[name]
        assert right < base_rate * tried, name


@pytest.mark.parametrize("kind", ["qwen3_5", "deepseek_v3"])
def test_an_mtp_head_never_adapts_and_the_texts_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    """In one batch, of models that are recurrent or have latent attention; the head drafts the base's next tokens."""
    path = save_headed(kind, tmp_path / "model", agree)
    adapters = {
        name: save_adapter(path, tmp_path / name, {"r": 4 * seed, "target_modules": ["q_proj", "o_proj"]}, seed)
        for seed, name in enumerate(NAMES)
        if name
    }
    texts = {name: expected(path, adapters, name, torch.float32) for name in NAMES}
    assert len({tuple(text) for text in texts.values()}) == len(NAMES)

    async def story(engine: Engine) -> None:
        for _ in range(2):
            answers = await asyncio.gather(*(answer(engine, asked(name)) for name in NAMES))
            assert {name: tokens(events) for name, events in zip(NAMES, answers, strict=True)} == texts
        tried, right = _drafts(engine)
        assert 0 < right < tried

    settings = {"slots": 3, "dtype": "float32", "drafter": "mtp", "draft_tokens": 3}
    run_with_engine(path, story, lora=lora(adapters), **settings)


def _drafts(engine: Engine) -> tuple[int, int]:
    """Draft tokens in all, and accepted ones."""
    counts = engine.stats().drafts
    return sum(sum(count.drafted) for count in counts), sum(sum(count.accepted) for count in counts)


def test_the_disk_cache_separates_adapters_and_their_versions_after_a_restart(
    folder: Folder, adapters: dict[str, Path], tmp_path: Path
) -> None:
    path, cached = folder("llama"), dict[str, int]()

    async def story(engine: Engine) -> None:
        for name in names:
            events = await answer(engine, asked(name))
            assert tokens(events) == expected(path, adapters, name), name
            [started] = [event for event in events if isinstance(event, Started)]
            cached[name] = started.cached_tokens

    def run() -> None:
        settings = {"slots": 2, "drafter": "none", "disk_cache": str(tmp_path / "cache")}
        run_with_engine(path, story, lora=lora(adapters), **settings)

    names: tuple[str, ...] = ("first",)
    run()
    assert cached == {"first": 0}
    names = ("second", "", "first")
    run()
    assert cached["second"] == cached[""] == 0
    assert cached["first"] > 0
    change_weights(adapters["first"], lambda tensors: {key: 2 * tensor for key, tensor in tensors.items()})
    names = ("first", "second")
    run()
    assert cached["first"] == 0
    assert cached["second"] > 0
