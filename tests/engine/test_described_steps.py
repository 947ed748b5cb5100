"""The runner that the description of a model names computes all its steps, with any drafter, cells and weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest

from engine.config import EngineConfig
from engine.core import Core
from engine.draft.loading import load_draft, make_speculation
from engine.errors import ModelError
from engine.load.load import load
from engine.model.model_runner import runners_of
from engine.native.runner import NativeRunner
from engine.types.events import Finished
from engine.types.request import Request, SamplingParams
from engine.types.status import DraftingInfo
from server.configuration.settings import Settings
from server.lifecycle import banner
from tests.engine.draft.mtp_models import save_headed
from tests.engine.kit.models import CONTEXT, save_model
from tests.engine.kit.play import Job, ask, play
from tests.selection import quick

HEADED = ("glm4_moe", "qwen3_5")
CASES = [
    *product(
        ("llama", "gemma3", "qwen3_next", "deepseek_v3", *HEADED),
        ("auto", "none", "mtp", "model"),
        ("auto", "int8", "bfloat16"),
        ("none", "int8", "int4"),
    )
]
FAST = [
    ("llama", "model", "int8", "none"),
    ("gemma3", "auto", "bfloat16", "int4"),
    ("deepseek_v3", "auto", "auto", "none"),
    ("glm4_moe", "auto", "int8", "none"),
    ("qwen3_5", "mtp", "auto", "int8"),
]
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Tiny models, with an MTP head where their family has one here."""
    root = tmp_path_factory.mktemp("described")
    return cache(lambda name: save_headed(name, root / name) if name in HEADED else save_model(name, root / name))


def requests() -> list[Request]:
    """Plain, sampled, with log-probabilities, scored, and pooled."""
    sampled = SamplingParams(temperature=1.0, seed=5)
    fields = ({}, {"sampling": sampled}, {"logprobs": 2}, {"score_from": 0, "logprobs": 0})
    asked = [ask(f"r{at}", range(at, at + 11), 8, ignore_eos=True, **more) for at, more in enumerate(fields)]
    return [*asked, ask("pooled", range(30), 0, pooling="mean")]


@pytest.mark.parametrize(("name", "drafter", "kv_dtype", "quantize"), quick(FAST, CASES))
def test_what_the_description_names_computes_every_step(
    name: str, drafter: str, kv_dtype: str, quantize: str, folders: Folders
) -> None:
    """Start-up screen and runners agree; combinations that the start refuses are skipped."""
    draft_model = str(folders("llama")) if drafter == "model" else None
    config = EngineConfig(
        model=str(folders(name)),
        dtype="float32",
        context=CONTEXT,
        slots=3,
        drafter=drafter,
        draft_model=draft_model,
        kv_dtype=kv_dtype,
        quantize=quantize,
        draft_tokens=2,
    )
    try:
        loaded = load(config, lambda phase: None)
        draft = load_draft(config, loaded, lambda phase: None)
    except ModelError as error:
        pytest.skip(str(error))
    core = Core(loaded, config, make_speculation(config, loaded, draft, lambda: 0.0))
    fastest, *slower = runners_of(loaded.runner)
    with ExitStack() as patches:
        for runner in slower:
            patches.enter_context(patch.object(runner, "run", side_effect=AssertionError("a slower runner")))
        answers = play(core, [Job(request) for request in requests()])

    assert all(isinstance(answer.end, Finished) for answer in answers.values())
    assert isinstance(fastest, NativeRunner) == (loaded.info.not_native_reason is None)
    text = banner(loaded.info, loaded.memory, DraftingInfo(), Settings(), "http://127.0.0.1:8000")
    assert ("one native call" in text) == isinstance(fastest, NativeRunner)
    if loaded.info.not_native_reason is not None:
        assert loaded.info.not_native_reason in text
