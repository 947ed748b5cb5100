"""MTP drafts in one native call: those of torch modules, without an effect on outputs."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast
from unittest.mock import patch

import pytest
import torch

from engine.draft import mtp_head
from engine.draft.depth import FixedDepth
from engine.draft.loading import drafted_vocabulary
from engine.draft.mtp import MtpDrafter
from engine.draft.mtp_head import MtpHead, MtpRunner, load_mtp
from engine.draft.speculation import Speculation
from engine.load.load import LoadedModel
from engine.native.pairs import NativePairRunner
from engine.types.request import Request, SamplingParams, SpeculationParams
from kvcache.cache import Cache
from tests.engine.draft.mtp_models import KINDS, agree, save_headed
from tests.engine.draft.test_mtp import RecordingDrafter
from tests.engine.kit.models import CONTEXT, core, load_model
from tests.engine.kit.play import Job, ask, play
from tests.selection import quick

Kernels = Literal["auto", "torch"]
Headed = Callable[..., tuple[LoadedModel, MtpHead]]
DEPTH = 3
# Of a dense and a recurrent model, with experts and latent attention.
QUICK = ["qwen3_5", "deepseek_v3"]


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Headed:
    """A tiny model with its head in float32."""

    def load(kind: str, kernels: Kernels, *, agreeing: bool = False) -> tuple[LoadedModel, MtpHead]:
        folder = save_headed(kind, tmp_path_factory.mktemp(kind), agree if agreeing else None)
        target = load_model(folder, "float32", kernels=kernels)
        return target, load_mtp(target)

    return cache(load)


def requests(tokens: int = 24) -> list[Request]:
    """Greedy and sampled, of which the last one is sampled by torch."""
    samplings = [SamplingParams(temperature=0.8 * (at > 0), seed=at) for at in range(4)]
    samplings += [SamplingParams(temperature=0.8, seed=9, presence_penalty=1.0)]
    return [
        ask(f"{at}", tuple(range(5 + 40 * at, 25 + 45 * at)), tokens, sampling=sampling, ignore_eos=True)
        for at, sampling in enumerate(samplings)
    ]


def play_drafted(
    target: LoadedModel,
    head: MtpHead,
    submitted: Sequence[Request],
    *,
    pending: int = 256,
    cells: int | None = None,
    cell_dtype: torch.dtype = torch.float32,
    vocabulary: int | None = None,
) -> tuple[dict[str, list[int]], RecordingDrafter, int]:
    """The output of each request, its drafts, and the number of preemptions."""
    specs = [plan.spec for plan in head.runner.layers]
    memory = Cache(specs, slots=4, capacity=CONTEXT, cells=4 * CONTEXT, dtype=cell_dtype)
    vocabulary = target.info.vocabulary if vocabulary is None else vocabulary
    drafter = MtpDrafter(memory, head.runner, chunk=16, vocabulary=vocabulary, pending=pending)
    recorder = RecordingDrafter(drafter)
    speculation = Speculation(None, recorder, FixedDepth(DEPTH), lambda: 0.0, reader=drafter)
    run = core(target, speculation=speculation, slots=4, chunk=11, cells=cells)
    answers = play(run, [Job(request, at) for at, request in enumerate(submitted)], most_steps=5000)
    return {name: answer.tokens for name, answer in answers.items()}, recorder, run.stats().preemptions_total


@pytest.mark.parametrize(
    ("kind", "pending"), quick([*zip(QUICK, (4, 256), strict=True)], itertools.product(KINDS, (4, 256)))
)
def test_native_drafts_are_those_of_the_modules(headed: Headed, kind: str, pending: int) -> None:
    """Of several sequences with prompts in chunks, and with pending hidden states."""
    recorded = []
    for kernels, runner in (("auto", NativePairRunner), ("torch", MtpRunner)):
        target, head = headed(kind, kernels)
        assert type(head.runner) is runner
        with patch.object(head.runner, "run_pairs", wraps=head.runner.run_pairs) as calls:
            outputs, recorder, _ = play_drafted(target, head, requests(), pending=pending)
        drafts = [(request.sequence_id, text, draft) for request, text, draft in recorder.recorded]
        recorded.append((outputs, drafts, calls.call_count))

    assert recorded[0][:2] == recorded[1][:2]
    assert sum(len(draft) for _, _, draft in recorded[0][1]) > 100
    # Those of the request with a penalty alone.
    assert 0 < recorded[0][2] < recorded[1][2] / 2 + 24


@pytest.mark.parametrize("kind", quick(QUICK, KINDS))
def test_native_drafts_do_not_change_the_output(headed: Headed, kind: str) -> None:
    """With preemptions, and where a prompt is cached; drafts of an agreeing head are accepted."""
    target, head = headed(kind, "auto", agreeing=True)
    assert isinstance(head.runner, NativePairRunner)
    submitted = requests(40)
    alone = {request.id: play(core(target), [Job(request)])[request.id].tokens for request in submitted}

    outputs, recorder, preemptions = play_drafted(target, head, submitted, cells=CONTEXT + 20)

    assert alone == outputs
    assert preemptions > 0
    accepted = [
        draft == alone[request.sequence_id][request.emitted :][: len(draft)]
        for request, _, draft in recorder.recorded
        if draft
    ]
    assert sum(accepted) > 0.7 * len(accepted)
    assert len(accepted) > 10


def test_only_frequent_tokens_are_drafted(headed: Headed) -> None:
    """The output has others too."""
    target, head = headed("qwen3_5", "auto")
    submitted = requests()
    outputs, recorder, _ = play_drafted(target, head, submitted, vocabulary=37)

    assert outputs == {request.id: play(core(target), [Job(request)])[request.id].tokens for request in submitted}
    assert max(token for tokens in outputs.values() for token in tokens) >= 37
    # Requests with a penalty have no native draft loop.
    drafted = {token for request, _, draft in recorder.recorded if request.sequence_id != "4" for token in draft}
    assert drafted
    assert max(drafted) < 37


class ByteTokenizer:
    """Tokens of characters from a first one on."""

    def __init__(self, first: int) -> None:
        self._first = first

    def encode_inside_text(self, text: str) -> list[int]:
        return [self._first + byte for byte in text.encode()]


@pytest.mark.parametrize(
    ("vocabulary", "first", "drafted"), [(151_936, 0, 65_536), (49_152, 0, 49_152), (262_144, 236_743, 262_144)]
)
def test_vocabularies_that_start_with_characters_are_ordered(vocabulary: int, first: int, drafted: int) -> None:
    target = SimpleNamespace(tokenizer=ByteTokenizer(first), info=SimpleNamespace(vocabulary=vocabulary))

    assert drafted_vocabulary(cast(LoadedModel, target)) == drafted


def test_a_native_head_resumes_from_its_prefix_tree(headed: Headed) -> None:
    """And begins after a prefix that it has not computed."""
    target, head = headed("deepseek_v3", "auto", agreeing=True)
    prompt = tuple(range(3, 63))
    for fields in ({}, {"speculation": SpeculationParams("none")}):
        first = ask("first", prompt, 4, ignore_eos=True, **fields)
        again = ask("again", prompt, 20, ignore_eos=True)
        outputs, recorder, _ = play_drafted(target, head, [first, again], pending=8)

        assert outputs["again"] == play(core(target), [Job(again)])["again"].tokens
        drafts = [draft for request, _, draft in recorder.recorded if request.sequence_id == "again"]
        assert any(len(draft) == DEPTH for draft in drafts)


@pytest.mark.parametrize(
    ("kind", "quantize"),
    quick([*zip(QUICK, ("none", "int8"), strict=True)], itertools.product(KINDS, ("none", "int8"))),
)
def test_heads_of_bfloat16_models_are_native(
    kind: str, quantize: Literal["none", "int8"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is that without drafts, natively and in torch modules, which get float32 states of the native step."""
    monkeypatch.setattr("engine.load.load.is_small", lambda folder: False)
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor does not multiply bfloat16: float32 is what it computes in")
    folder = save_headed(kind, tmp_path, lambda weights: weights.update({k: v.bfloat16() for k, v in weights.items()}))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))
    target = load_model(folder, "auto", quantize=quantize)
    assert target.dtype == torch.bfloat16
    head, submitted = load_mtp(target), requests()[:2]
    assert type(head.runner) is NativePairRunner
    with patch.object(mtp_head, "_native_runner", return_value=None):
        heads = (head, load_mtp(target))

    for head in heads:
        outputs, recorder, _ = play_drafted(target, head, submitted, cell_dtype=target.kv_dtype)

        for request in submitted:
            assert outputs[request.id] == play(core(target), [Job(request)])[request.id].tokens
        assert any(draft for _, _, draft in recorder.recorded)


def test_a_head_that_differs_from_its_modules_runs_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log has the difference."""
    target = load_model(save_headed("qwen3_5", tmp_path), "float32")
    monkeypatch.setattr(mtp_head, "logit_tolerance", lambda decoder: 0.0)

    with caplog.at_level(logging.WARNING, "cellar.engine"):
        head = load_mtp(target)

    assert type(head.runner) is MtpRunner
    assert "the MTP layer runs in torch operations, because the native step changes its logits" in caplog.text
