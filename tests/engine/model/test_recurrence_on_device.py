"""Recurrent layers on a device: the sequences of a decoding step are one batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.run import packed
from kvcache.state_pool import PooledState
from tests.engine.kit.mixes import mix, prompts
from tests.engine.kit.models import core, load_model
from tests.engine.kit.play import ask, play, texts
from tests.fake_device import FAKE, fake_device
from tests.selection import quick

Folder = Callable[[str], Path]
FAMILIES = ("qwen3_next", "mamba", "mamba2", "jamba", "lfm2")


class CountingMode(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", quick(("mamba2",), FAMILIES))
def test_text_is_that_of_the_cpu(family: str, folder: Folder) -> None:
    """Prompts in chunks beside decoded tokens, prefix hits, cancels and preemption."""
    traffic = mix(5, prompts(len(family)), scarce=True)
    settings = {"slots": traffic.slots, "chunk": traffic.chunk, "cells": traffic.cells}
    expected = play(core(load_model(folder(family), "float32", kernels="torch"), **settings), traffic.jobs)
    with fake_device():
        answers = play(core(load_model(folder(family), "float32", device=FAKE), **settings), traffic.jobs)

    assert texts(expected) == texts(answers)


@pytest.mark.parametrize("family", quick(("mamba2",), FAMILIES))
def test_the_number_of_sequences_adds_no_operation(
    family: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the recurrent operations of a step, which read and write rows of the pool."""
    counts: list[int] = []
    recur = packed._CacheBackend.recur

    def counted(self: Any, *args: Any) -> Any:
        with CountingMode() as mode:
            result = recur(self, *args)
        counts.append(mode.count)
        return result

    monkeypatch.setattr(packed._CacheBackend, "recur", counted)
    with fake_device():
        loaded = load_model(folder(family), "float32", device=FAKE)
        found = []
        for sequences in (2, 6):
            engine = core(loaded, slots=6)
            for number in range(sequences):
                engine.submit(ask(f"{number}", range(3, 9), 20, ignore_eos=True))
            for _ in range(4):
                engine.step()
            counts.clear()
            engine.step()
            found.append(tuple(counts))
            states = engine.cache.recurrent_states
            assert states is not None
            assert all(isinstance(own.states[own.length], PooledState) for own in states._slots[:sequences])

    assert found[0] == found[1]
    assert torch.tensor(found[0]).min() > 0
