"""MTP drafts: equal to transformers with the same layer, and without an effect on outputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers.cache_utils import MtpCache

from engine.config import EngineConfig
from engine.convert.convert import convert
from engine.core import Core
from engine.draft.depth import FixedDepth
from engine.draft.loading import load_draft, make_speculation
from engine.draft.mtp import MtpDrafter
from engine.draft.mtp_head import MtpHead, has_mtp, load_mtp
from engine.draft.speculation import Speculation
from engine.errors import ModelUnsupported
from engine.load.check import selftest
from engine.load.load import LoadedModel
from engine.native.runner import NativeRunner
from engine.run.graphs import CallRecorder, GraphRunner
from engine.run.runner import runners_of
from engine.schedule.draft import DraftRequest
from engine.types.events import Delta
from engine.types.request import Request, SamplingParams, SpeculationParams
from kvcache.cache import Cache
from tests.engine.convert.checkpoints import conversion
from tests.engine.draft.mtp_models import KINDS, agree, save_headed
from tests.engine.kit.models import CONTEXT, VOCABULARY, core, load_model
from tests.engine.kit.play import Answer, Job, ask, play, texts
from tests.fake_device import FAKE, fake_device
from tests.selection import quick

Headed = Callable[..., tuple[LoadedModel, MtpHead]]
LAYOUTS = ("deepseek_v3", "qwen3_next")
DEPTH = 3


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Headed:
    """A kind's tiny model with its head: a random one, or one that agrees with the model."""

    def load(kind: str, *, agreeing: bool = False) -> tuple[LoadedModel, MtpHead]:
        folder = tmp_path_factory.mktemp(kind)
        target = load_model(save_headed(kind, folder, agree if agreeing else None))
        return target, load_mtp(target)

    return cache(load)


@dataclass
class RecordingDrafter:
    """Records requests and drafts of a drafter."""

    drafter: MtpDrafter
    recorded: list[tuple[DraftRequest, list[int], list[int]]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.drafter.kind

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """The drafts; the tokens of a request are valid during the call only."""
        drafts = self.drafter.propose(requests)
        self.recorded += [(one, list(one.tokens), draft) for one, draft in zip(requests, drafts, strict=True)]
        return drafts

    def forget(self, sequence_id: str, output: Sequence[int]) -> None:
        self.drafter.forget(sequence_id, output)

    def flush(self, budget_bytes: int) -> bool:
        return self.drafter.flush(budget_bytes)


def drafter(heads: MtpHead, *, slots: int = 4, pending: int = 256, cells: int | None = None) -> MtpDrafter:
    """A head over a cache of its own."""
    specs = [plan.spec for plan in heads.runner.layers]
    cells = slots * CONTEXT if cells is None else cells
    memory = Cache(specs, slots=slots, capacity=CONTEXT, cells=cells, dtype=torch.float64)
    return MtpDrafter(memory, heads.runner, chunk=16, vocabulary=VOCABULARY, pending=pending)


def engine(target: LoadedModel, head: MtpDrafter, recorder: RecordingDrafter | None = None, **settings: int) -> Core:
    """An engine with MTP drafts."""
    return core(
        target, speculation=Speculation(None, recorder or head, FixedDepth(DEPTH), lambda: 0.0, reader=head), **settings
    )


def requests(count: int, tokens: int = 14, **fields: object) -> list[Request]:
    """Requests of different lengths and sampling parameters; the first one is greedy."""
    samplings = [SamplingParams(temperature=0.8 * (at > 0), seed=at) for at in range(count)]
    return [
        ask(f"{at}", tuple(range(5 + 40 * at, 20 + 45 * at)), tokens, sampling=sampling, ignore_eos=True, **fields)
        for at, sampling in enumerate(samplings)
    ]


def alone(target: LoadedModel, submitted: Sequence[Request]) -> dict[str, list[int]]:
    """The output of each request alone in an engine without drafts."""
    return {one.id: play(core(target), [Job(one)])[one.id].tokens for one in submitted}


def tokens(answers: dict[str, Answer]) -> dict[str, list[int]]:
    """The output tokens."""
    return {name: answer.tokens for name, answer in answers.items()}


@pytest.mark.parametrize("kind", quick([*KINDS][:2], KINDS))
def test_drafts_of_an_agreeing_head_are_accepted(headed: Headed, kind: str) -> None:
    """From weights under the published names; drafts of a random head are rejected, and the output is the same."""
    rates = []
    for agreeing in (True, False):
        target, heads = headed(kind, agreeing=agreeing)
        submitted = [*requests(2), ask("greedy", (9, 8, 7, 200), 14, ignore_eos=True)]
        run = engine(target, drafter(heads))

        assert alone(target, submitted) == tokens(play(run, [Job(one, at) for at, one in enumerate(submitted)]))

        (counts,) = run.stats().drafts
        assert "mtp" == counts.kind
        rates.append(sum(counts.accepted) / sum(counts.drafted))

    assert rates[0] > 0.95
    assert rates[1] < 0.3


@pytest.mark.parametrize(
    ("kind", "pending"), quick([*zip(LAYOUTS, (4, 256), strict=True)], itertools.product(LAYOUTS, (4, 256)))
)
def test_mtp_drafts_equal_transformers(headed: Headed, kind: str, pending: int) -> None:
    """With prompts in chunks and with pending hidden states."""
    target, heads = headed(kind)
    recorder = RecordingDrafter(drafter(heads, pending=pending))
    play(engine(target, recorder.drafter, recorder, chunk=7), [Job(one, at) for at, one in enumerate(requests(3, 8))])

    greedy = [(text, draft) for one, text, draft in recorder.recorded if one.draw.params.temperature == 0]
    assert len(greedy) > 4
    # Near the output limit drafts are shorter.
    assert [(text, reference_draft(target, heads, text)[: len(draft)]) for text, draft in greedy] == greedy


def reference_draft(target: LoadedModel, heads: MtpHead, text: list[int]) -> list[int]:
    """The greedy draft of the head after a text, by transformers alone."""
    layers = heads.runner._layer.layers
    states = target.model.get_decoder()(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state
    read, drafted = text[1:], []
    for _ in range(DEPTH):
        positions = torch.arange(1, len(read) + 1)[None]
        made = layers.forward_layer(0, states, positions, MtpCache(), input_ids=torch.tensor([read]))
        drafted.append(int(target.model.lm_head(made[0, -1]).argmax()))
        read, states = [*read, drafted[-1]], torch.cat((states, made[:, -1:]), 1)
    return drafted


EVENTS = ("shift", "preempt", "cancel")


@pytest.mark.parametrize("event", EVENTS)
def test_events_do_not_change_the_output(headed: Headed, event: str) -> None:
    """Context shifts, preemption and a cancelled request; drafts are still accepted."""
    check_event(headed, "deepseek_v3", event)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("event", EVENTS)
def test_events_do_not_change_the_output_of_any_kind(headed: Headed, kind: str, event: str) -> None:
    """Of hybrid models, and of all kinds of heads."""
    check_event(headed, kind, event)


def check_event(headed: Headed, kind: str, event: str) -> None:
    """Compare outputs with an event during drafts to outputs alone."""
    target, heads = headed(kind, agreeing=True)
    fields = {"overflow": "shift"} if event == "shift" else {}
    submitted = requests(3, 130, **fields) if event == "shift" else requests(5, 30)
    cells = CONTEXT + 20 if event == "preempt" else None
    run = engine(target, drafter(heads, pending=16), slots=4, cells=cells)
    jobs = [Job(one, at, 9 if event == "cancel" and at == 0 else None) for at, one in enumerate(submitted)]

    outputs, expected = tokens(play(run, jobs, most_steps=5000)), alone(target, submitted)

    assert {name: expected[name][: len(own)] for name, own in outputs.items()} == outputs
    assert (run.stats().preemptions_total > 0) == (event == "preempt")
    (counts,) = run.stats().drafts
    assert sum(counts.accepted) > 30


def test_the_head_starts_behind_a_prefix_without_its_cells(headed: Headed) -> None:
    """The model reuses a cached prompt that the head has not computed; the drafts after it are accepted."""
    target, heads = headed("deepseek_v3", agreeing=True)
    prompt = tuple(range(3, 63))
    unseen = ask("unseen", prompt, 4, ignore_eos=True, speculation=SpeculationParams("none"))
    run = engine(target, drafter(heads))
    play(run, [Job(unseen)])

    answer = play(run, [Job(ask("seen", prompt, 20, ignore_eos=True))])["seen"]

    assert answer.end.usage.cached_tokens > 40  # type: ignore[union-attr]
    assert answer.end.usage.accepted_tokens > 10  # type: ignore[union-attr]


def test_a_cached_prefix_of_the_head_gives_the_same_drafts(headed: Headed) -> None:
    """Of a prompt that model and head have computed before."""
    target, heads = headed("deepseek_v3")
    prompt = tuple(range(3, 63))
    recorded = []
    for again in (False, True):
        recorder = RecordingDrafter(drafter(heads, pending=8))
        run = engine(target, recorder.drafter, recorder)
        if again:
            play(run, [Job(ask("before", prompt, 20, ignore_eos=True))])
            recorder.recorded.clear()
        play(run, [Job(ask("now", prompt, 20, ignore_eos=True))])
        recorded.append([(text, draft) for _, text, draft in recorder.recorded if draft])

    assert recorded[1]
    assert recorded[1][-10:] == recorded[0][-10:]


@dataclass
class CooldownDepth(FixedDepth):
    """A fixed depth with a cooldown of as many steps as the test says."""

    steps: int

    def __post_init__(self) -> None:
        super().__init__(DEPTH)

    def cooldown(self, kind: str, batch_tokens: int) -> int:
        return self.steps


def test_states_are_read_near_the_end_of_a_cooldown_only(headed: Headed) -> None:
    """Later drafts have the context from then on; they are accepted."""
    target, heads = headed("deepseek_v3", agreeing=True)
    head, depth = drafter(heads), CooldownDepth(40)
    run = core(target, speculation=Speculation(None, head, depth, lambda: 0.0, reader=head))
    request = ask("own", tuple(range(3, 33)), 60, ignore_eos=True)
    run.submit(request)
    read, output = [], []
    while run.busy:
        output += [token for _, event in run.step() if isinstance(event, Delta) for token in event.tokens]
        read.append(run._speculation.reads_hidden_states)
        depth.steps = max(depth.steps - 1, 0)

    assert read[:20] == [False] * 20
    assert read[-1]
    assert alone(target, [request])["own"] == output
    (counts,) = run.stats().drafts
    assert sum(counts.accepted) > 10


@pytest.mark.parametrize(("tokens", "reads"), [(None, False), (2, True)])
def test_states_are_read_at_depth_0_for_requests_with_a_depth_only(
    headed: Headed, tokens: int | None, reads: bool
) -> None:
    target, heads = headed("deepseek_v3", agreeing=True)
    head = drafter(heads)
    run = core(target, speculation=Speculation(None, head, FixedDepth(0), lambda: 0.0, reader=head))
    fields = {} if tokens is None else {"speculation": SpeculationParams(tokens=tokens)}

    play(run, [Job(ask("own", tuple(range(3, 33)), 20, ignore_eos=True, **fields))])

    assert reads == run._speculation.reads_hidden_states
    (counts,) = run.stats().drafts
    assert reads == (sum(counts.accepted) > 5)


def test_the_head_caches_nothing_of_an_uncacheable_request(headed: Headed) -> None:
    """Not while it catches up with the prompt either."""
    target, heads = headed("deepseek_v3")
    head = drafter(heads, pending=8)
    request = ask("now", tuple(range(3, 63)), 20, ignore_eos=True, salt=b"own", cacheable=False)
    play(engine(target, head), [Job(request)])

    assert head._cache._tree.node_count == 0
    assert head._cache.free_cells == head._cache.cells


def settings(target: LoadedModel, **fields: object) -> EngineConfig:
    """The settings of a model without a draft model."""
    return EngineConfig(model=target.info.folder, context=CONTEXT, slots=2, dtype="float64", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("drafter", "kinds"), [("auto", ("lookup", "mtp")), ("mtp", ("mtp",)), ("lookup", ("lookup",))]
)
def test_a_head_drafts_where_there_is_one(headed: Headed, drafter: str, kinds: tuple[str, ...]) -> None:
    """Unless the settings name another drafter."""
    target, _ = headed("deepseek_v3")
    config = settings(target, drafter=drafter)

    assert kinds == make_speculation(config, target, load_draft(config, target, lambda phase: None), lambda: 0.0).kinds


@pytest.mark.parametrize(
    ("kind", "drafter"),
    quick([("glm4_moe", "auto"), ("qwen3_5", "mtp")], itertools.product(["glm4_moe", "qwen3_5"], ["auto", "mtp"])),
)
def test_a_head_reads_states_of_the_native_step(kind: str, drafter: str, tmp_path: Path) -> None:
    """All steps are native, as the description says, with the drafts and the text of torch modules."""
    folder, outcomes = save_headed(kind, tmp_path), []
    jobs = [Job(ask(f"r{at}", range(at, at + 9), 12, ignore_eos=True), at) for at in range(3)]
    for kernels in ("torch", "auto"):
        target = load_model(folder, "float32", drafter=drafter, kernels=kernels)
        fastest, *others = runners_of(target.runner)
        assert isinstance(fastest, NativeRunner) == (target.info.not_native_reason is None) == (kernels == "auto")
        config = replace(settings(target, drafter=drafter, draft_tokens=2), dtype="float32")
        head = load_draft(config, target, lambda phase: None)
        assert isinstance(head, MtpHead)
        drafted = Core(target, config, make_speculation(config, target, head, lambda: 0.0))
        with ExitStack() as patches:
            for slower in others:
                patches.enter_context(patch.object(slower, "run", side_effect=AssertionError("a slower step")))
            answers = play(drafted, jobs)
        (counts,) = [counts for counts in drafted.stats().drafts if counts.kind == "mtp"]
        outcomes.append((texts(answers), counts))

    assert outcomes[0] == outcomes[1]
    assert 0 < sum(counts.drafted)


def test_a_head_reads_states_of_recorded_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; with the text of the CPU."""
    monkeypatch.setattr(selftest, "recorder_for", lambda device: CallRecorder())
    folder = save_headed("glm4_moe", tmp_path, agree)
    jobs = [Job(ask(f"r{at}", range(at, at + 9), 12, ignore_eos=True), at) for at in range(3)]
    expected = texts(play(core(load_model(folder, "float32"), slots=4), jobs))
    with fake_device():
        target = load_model(folder, "float32", device=FAKE)
        assert isinstance(target.runner, GraphRunner)
        config = replace(settings(target, device=FAKE, draft_tokens=2), dtype="float32")
        head = load_draft(config, target, lambda phase: None)
        assert isinstance(head, MtpHead)
        drafted = Core(target, config, make_speculation(config, target, head, lambda: 0.0))
        assert expected == texts(play(drafted, jobs))
        assert target.runner._steps
    (counts,) = [counts for counts in drafted.stats().drafts if counts.kind == "mtp"]
    assert 0 < sum(counts.accepted)


@pytest.mark.parametrize("kind", quick(["qwen3_5"], KINDS))
def test_a_head_in_a_gguf_file_drafts_like_that_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    """Its drafts are accepted as often, and the text is that of the checkpoint."""
    folder, file = save_headed(kind, tmp_path / "model", agree), tmp_path / "model.gguf"
    convert(replace(conversion(folder, file), pre_tokenizer="gpt-2"))
    submitted, outcomes = requests(2), []
    for path in (folder, file):
        target = load_model(path)
        assert has_mtp(target)
        run = engine(target, drafter(load_mtp(target)))
        answers = tokens(play(run, [Job(one, at) for at, one in enumerate(submitted)]))
        (counts,) = run.stats().drafts
        outcomes.append((answers, sum(counts.accepted) / sum(counts.drafted)))

    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] > 0.9


def test_a_draft_model_replaces_a_head(headed: Headed, folder: Callable[[str], Path]) -> None:
    target, _ = headed("deepseek_v3")
    config = settings(target, draft_model=str(folder("llama")))

    speculation = make_speculation(config, target, load_draft(config, target, lambda phase: None), lambda: 0.0)

    assert ("lookup", "model") == speculation.kinds


def test_a_missing_head_is_an_error_if_the_settings_name_it(loaded: Callable[..., LoadedModel]) -> None:
    target = loaded("llama")

    assert load_draft(settings(target), target, lambda phase: None) is None
    with pytest.raises(ModelUnsupported, match="its files have no MTP layer"):
        load_draft(settings(target, drafter="mtp"), target, lambda phase: None)


def test_a_head_that_lacks_weights_drafts_nothing(tmp_path: Path) -> None:
    """If the settings name it, the load fails with the reason; else there are no MTP drafts."""
    target = load_model(save_headed("qwen3_next", tmp_path, lambda weights: weights.__delitem__("mtp.fc.weight")))

    assert load_draft(settings(target), target, lambda phase: None) is None
    with pytest.raises(ModelUnsupported, match="its MTP layer cannot be used .*weights are missing"):
        load_draft(settings(target, drafter="mtp"), target, lambda phase: None)
