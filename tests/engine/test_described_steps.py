"""The runner that the description of a model names computes all its steps: any drafter, cells, ranks, media."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from engine.config import EngineConfig
from engine.core import Core
from engine.draft.loading import load_draft, make_speculation
from engine.errors import InvalidRequest, ModelError
from engine.load.load import LoadedModel
from engine.native.runner import NativeRunner
from engine.parallel.loading import loaded_model
from engine.parallel.messages import geometry_of
from engine.parallel.runner import TensorParallelRunner
from engine.run.runner import runners_of
from engine.step.input import StepFeatures
from engine.types.events import Finished
from engine.types.request import Request, SamplingParams
from engine.types.status import DraftingInfo
from engine.validity import check_request
from server.configuration.settings import Settings
from server.lifecycle import banner
from tests.engine.draft.mtp_models import save_headed
from tests.engine.kit.encoders import KINDS, media, prompt, save_encoder_model
from tests.engine.kit.models import CONTEXT, save_model
from tests.engine.kit.play import Job, ask, play
from tests.engine.kit.served_contents import token_contents, with_token_contents
from tests.engine.parallel.test_equality import ignore
from tests.selection import quick

HEADED = ("glm4_moe", "qwen3_5")
FAMILIES = ("llama", "gemma3", "qwen3_next", "deepseek_v3", *HEADED)
# Models without recurrent layers, which several ranks refuse.
DIVIDED = ("llama", "gemma3", "deepseek_v3", "glm4_moe")
# Of each: model, drafter, cells, weights, ranks.
CASES = [
    *product(FAMILIES, ("auto", "none", "mtp", "model"), ("auto", "int8", "bfloat16"), ("none", "int8", "int4"), (1,)),
    *product(DIVIDED, ("auto", "model"), ("auto", "int8"), ("none",), (2,)),
    *product(KINDS, ("auto", "none"), ("auto", "int8", "bfloat16"), ("none", "int8"), (1,)),
]
FAST = [
    ("llama", "model", "int8", "none", 1),
    ("gemma3", "auto", "bfloat16", "int4", 1),
    ("deepseek_v3", "auto", "auto", "none", 1),
    ("glm4_moe", "auto", "int8", "none", 1),
    ("qwen3_5", "mtp", "auto", "int8", 1),
    ("mllama", "auto", "auto", "none", 1),
]
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Tiny models, with an MTP head or an encoder where their family has one here."""
    root = tmp_path_factory.mktemp("described")
    savers = {**dict.fromkeys(HEADED, save_headed), **dict.fromkeys(KINDS, save_encoder_model)}
    return cache(lambda name: savers.get(name, save_model)(name, root / name))


def requests(name: str) -> list[Request]:
    """Plain, sampled, with log-probabilities, scored, and pooled; with media if the model has an encoder."""
    sampled = SamplingParams(temperature=1.0, seed=5)
    fields = ({}, {"sampling": sampled}, {"logprobs": 2}, {"score_from": 0, "logprobs": 0})
    if name in KINDS:
        own = {"media": media(name, 1, 1 if name == "mllama" else 7), "ignore_eos": True}
        # An image token has no log-probability.
        asked = [ask(f"r{at}", prompt(name, at, 11, 1), 8, **own, **more) for at, more in enumerate(fields[:3])]
        return [*asked, ask("pooled", prompt(name, 5, 30, 1), 0, pooling="mean", media=own["media"])]
    asked = [ask(f"r{at}", range(at, at + 11), 8, ignore_eos=True, **more) for at, more in enumerate(fields)]
    return [*asked, ask("pooled", range(30), 0, pooling="mean")]


@pytest.mark.parametrize(("name", "drafter", "kv_dtype", "quantize", "ranks"), quick(FAST, CASES))
def test_what_the_description_names_computes_every_step(
    name: str, drafter: str, kv_dtype: str, quantize: str, ranks: int, folders: Folders
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
        tensor_parallel=ranks,
        threads=ranks,
    )
    with ExitStack() as stack:
        try:
            loaded = stack.enter_context(loaded_model(config, ignore, ignore, reserved_bytes=0))
            draft = load_draft(config, loaded, ignore)
        except ModelError as error:
            pytest.skip(str(error))
        core = core_of(loaded, config, draft)
        fastest, *slower = runners_of(loaded.runner)
        for runner in slower:
            stack.enter_context(patch.object(runner, "run", side_effect=AssertionError("a slower runner")))
        answers = play(core, [Job(request) for request in requests(name)])

    assert all(isinstance(answer.end, Finished) for answer in answers.values())
    check_refusals(name, loaded)
    assert isinstance(fastest, TensorParallelRunner) == (ranks > 1)
    assert isinstance(fastest, NativeRunner) == (loaded.info.not_native_reason is None)
    assert loaded.info.tensor_parallel == ranks
    text = banner(loaded.info, loaded.memory, DraftingInfo(), Settings(), "http://127.0.0.1:8000")
    assert ("one native call" in text) == isinstance(fastest, NativeRunner)
    assert (f"{ranks} processes divide the model" in text) == (ranks > 1)
    if loaded.info.not_native_reason is not None:
        assert loaded.info.not_native_reason in text


def core_of(loaded: LoadedModel, config: EngineConfig, draft: Any) -> Core:
    """The core of a loaded model, whose workers have a cache of the same size."""
    if isinstance(loaded.runner, TensorParallelRunner):
        loaded.runner.workers.send(geometry_of(loaded))
    return Core(loaded, config, make_speculation(config, loaded, draft, lambda: 0.0))


def check_refusals(name: str, loaded: LoadedModel) -> None:
    """Requests with a feature are refused if, and only if, no runner of the model computes it."""
    plain = requests(name)[0]
    picture = media("mllama", 1, 1)
    changes = {
        "media": {"media": None if name in KINDS else picture},
        "contents": {"contents": token_contents(plain.prompt, (1, 4))},
    }
    refused = {"media": True, "contents": loaded.runner.supports(StepFeatures(contents=True)) is not None}
    loaded = with_token_contents(loaded)
    for field, change in changes.items():
        request = dataclasses.replace(plain, **change)
        with pytest.raises(InvalidRequest) if refused[field] else nullcontext() as refusal:
            check_request(request, loaded, drafters=(), chunk=64)
        assert refusal is None or refusal.value.field == field
