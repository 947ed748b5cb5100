"""A model's own head as a drafter: it guesses what transformers guesses with it, and no guess changes a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import MtpCache

from engine.config import EngineConfig
from engine.core import Core
from engine.draft.depth import FixedDepth
from engine.draft.loading import load_draft, make_speculation
from engine.draft.mtp import MtpDrafter, MtpHead, load_mtp
from engine.draft.speculation import Speculation
from engine.errors import ModelUnsupported
from engine.load.load import LoadedModel
from engine.schedule.draft import DraftRequest
from engine.types.request import Request, SamplingParams, SpeculationParams
from kvcache.cache import Cache
from tests.engine.draft.mtp_models import KINDS, agree, save_headed
from tests.engine.models import CONTEXT, core, load_model
from tests.engine.play import Answer, Job, ask, play

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
class Spy:
    """A drafter that writes down what it says to whom."""

    drafter: MtpDrafter
    said: list[tuple[DraftRequest, list[int], list[int]]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """As it is."""
        return self.drafter.kind

    def propose(self, wants: Sequence[DraftRequest]) -> list[list[int]]:
        """Write it down; a want's tokens are lent."""
        drafts = self.drafter.propose(wants)
        self.said += [(want, list(want.tokens), draft) for want, draft in zip(wants, drafts, strict=True)]
        return drafts

    def forget(self, sequence_id: str, said: Sequence[int]) -> None:
        """As it does."""
        self.drafter.forget(sequence_id, said)

    def flush(self, budget_bytes: int) -> bool:
        """As it does."""
        return self.drafter.flush(budget_bytes)


def drafter(heads: MtpHead, *, slots: int = 4, pending: int = 256, cells: int | None = None) -> MtpDrafter:
    """A head over a cache of its own."""
    specs = [plan.spec for plan in heads.runner.layers]
    cells = slots * CONTEXT if cells is None else cells
    memory = Cache(specs, slots=slots, capacity=CONTEXT, cells=cells, dtype=torch.float64)
    return MtpDrafter(memory, heads.runner, heads.states, chunk=16, pending=pending)


def engine(target: LoadedModel, head: MtpDrafter, spy: Spy | None = None, **settings: int) -> Core:
    """An engine whose drafts are the head's."""
    return core(
        target, speculation=Speculation(None, spy or head, FixedDepth(DEPTH), lambda: 0.0, reader=head), **settings
    )


def requests(count: int, tokens: int = 14, **fields: object) -> list[Request]:
    """Prompts of different lengths, each drawn in another way; the first one greedily."""
    ways = [SamplingParams(temperature=0.8 * (at > 0), seed=at) for at in range(count)]
    return [
        ask(f"{at}", tuple(range(5 + 40 * at, 20 + 45 * at)), tokens, sampling=way, ignore_eos=True, **fields)
        for at, way in enumerate(ways)
    ]


def alone(target: LoadedModel, asked: Sequence[Request]) -> dict[str, list[int]]:
    """What an engine without drafts says to each."""
    return {one.id: play(core(target), [Job(one)])[one.id].tokens for one in asked}


def tokens(answers: dict[str, Answer]) -> dict[str, list[int]]:
    """What was said."""
    return {name: answer.tokens for name, answer in answers.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_agrees_is_right_and_a_random_one_does_no_harm(headed: Headed, kind: str) -> None:
    """From weights in the published places: what the agreeing head says is said, what the random one says is not."""
    rates = []
    for agreeing in (True, False):
        target, heads = headed(kind, agreeing=agreeing)
        asked = [*requests(2), ask("greedy", (9, 8, 7, 200), 14, ignore_eos=True)]
        run = engine(target, drafter(heads))

        assert alone(target, asked) == tokens(play(run, [Job(one, at) for at, one in enumerate(asked)]))

        (counts,) = run.stats().drafts
        assert "mtp" == counts.kind
        rates.append(sum(counts.accepted) / sum(counts.drafted))

    assert rates[0] > 0.95
    assert rates[1] < 0.3


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("pending", [4, 256])
def test_mtp_drafts_equal_transformers(headed: Headed, kind: str, pending: int) -> None:
    """However prompts are cut and whether or not states wait: the same guesses as over each text anew."""
    target, heads = headed(kind)
    spy = Spy(drafter(heads, pending=pending))
    play(engine(target, spy.drafter, spy, chunk=7), [Job(one, at) for at, one in enumerate(requests(3, 8))])

    greedy = [(text, draft) for want, text, draft in spy.said if want.draw.params.temperature == 0]
    assert len(greedy) > 4
    # Where the text may end soon, less is drafted.
    assert [(text, guessed(target, heads, text)[: len(draft)]) for text, draft in greedy] == greedy


def guessed(target: LoadedModel, heads: MtpHead, text: list[int]) -> list[int]:
    """The head's greedy guesses at what follows a text, by transformers, without our cells."""
    layers = heads.runner._layer.layers
    states = target.model.get_decoder()(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state
    read, said = text[1:], []
    for _ in range(DEPTH):
        positions = torch.arange(1, len(read) + 1)[None]
        made = layers.forward_layer(0, states, positions, MtpCache(), input_ids=torch.tensor([read]))
        said.append(int(target.model.lm_head(made[0, -1]).argmax()))
        read, states = [*read, said[-1]], torch.cat((states, made[:, -1:]), 1)
    return said


EVENTS = ("shift", "preempt", "cancel")


@pytest.mark.parametrize("event", EVENTS)
def test_whatever_happens_the_text_stays(headed: Headed, event: str) -> None:
    """Shifted, preempted or with one that leaves: every text is the same, and drafts go on being said."""
    happens(headed, "deepseek_v3", event)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("event", EVENTS)
def test_whatever_happens_the_text_stays_on_every_kind(headed: Headed, kind: str, event: str) -> None:
    """The same for hybrids, and for all that the head may be made of."""
    happens(headed, kind, event)


def happens(headed: Headed, kind: str, event: str) -> None:
    """Let it happen to some sequences that draft."""
    target, heads = headed(kind, agreeing=True)
    fields = {"overflow": "shift"} if event == "shift" else {}
    asked = requests(3, 130, **fields) if event == "shift" else requests(5, 30)
    cells = CONTEXT + 20 if event == "preempt" else None
    run = engine(target, drafter(heads, pending=16), slots=4, cells=cells)
    jobs = [Job(one, at, 9 if event == "cancel" and at == 0 else None) for at, one in enumerate(asked)]

    said, expected = tokens(play(run, jobs, most_steps=5000)), alone(target, asked)

    assert {name: expected[name][: len(own)] for name, own in said.items()} == said
    assert (run.stats().preemptions_total > 0) == (event == "preempt")
    (counts,) = run.stats().drafts
    assert sum(counts.accepted) > 30


def test_a_text_that_the_head_did_not_see_is_followed_from_where_it_is_seen(headed: Headed) -> None:
    """The model remembers a prompt that the head never read: it begins behind it, and its guesses are right."""
    target, heads = headed("deepseek_v3", agreeing=True)
    prompt = tuple(range(3, 63))
    unseen = ask("unseen", prompt, 4, ignore_eos=True, speculation=SpeculationParams("none"))
    run = engine(target, drafter(heads))
    play(run, [Job(unseen)])

    answer = play(run, [Job(ask("seen", prompt, 20, ignore_eos=True))])["seen"]

    assert answer.end.usage.cached_tokens > 40  # type: ignore[union-attr]
    assert answer.end.usage.accepted_tokens > 10  # type: ignore[union-attr]


def test_what_one_sequence_read_serves_the_next(headed: Headed) -> None:
    """A prompt that was read before is recalled by model and head: the same guesses as if it were read anew."""
    target, heads = headed("deepseek_v3")
    prompt = tuple(range(3, 63))
    spies = []
    for again in (False, True):
        spy = Spy(drafter(heads, pending=8))
        run = engine(target, spy.drafter, spy)
        if again:
            play(run, [Job(ask("before", prompt, 20, ignore_eos=True))])
            spy.said.clear()
        play(run, [Job(ask("now", prompt, 20, ignore_eos=True))])
        spies.append([(text, draft) for _, text, draft in spy.said if draft])

    assert spies[1]
    assert spies[1][-10:] == spies[0][-10:]


def settings(target: LoadedModel, **fields: object) -> EngineConfig:
    """The settings of a model with nothing beside it."""
    return EngineConfig(model=target.info.folder, context=CONTEXT, slots=2, dtype="float64", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("drafter", "kinds"), [("auto", ("lookup", "mtp")), ("mtp", ("mtp",)), ("lookup", ("lookup",))]
)
def test_a_head_drafts_where_there_is_one(headed: Headed, drafter: str, kinds: tuple[str, ...]) -> None:
    """Unless another drafter is asked for; a draft model that is named goes before it."""
    target, _ = headed("deepseek_v3")
    config = settings(target, drafter=drafter)

    assert kinds == make_speculation(config, target, load_draft(config, target, lambda phase: None), lambda: 0.0).kinds


def test_a_draft_model_goes_before_a_head(headed: Headed, folder: Callable[[str], Path]) -> None:
    """It was named, so it is wanted."""
    target, _ = headed("deepseek_v3")
    config = settings(target, draft_model=str(folder("llama")))

    speculation = make_speculation(config, target, load_draft(config, target, lambda phase: None), lambda: 0.0)

    assert ("lookup", "model") == speculation.kinds


def test_a_head_that_is_missing_is_missed_only_where_it_was_asked_for(loaded: Callable[..., LoadedModel]) -> None:
    """The files of this model have none."""
    target = loaded("llama")

    assert load_draft(settings(target), target, lambda phase: None) is None
    with pytest.raises(ModelUnsupported, match="its files have no MTP layer"):
        load_draft(settings(target, drafter="mtp"), target, lambda phase: None)


def test_a_head_that_lacks_weights_drafts_nothing(tmp_path: Path) -> None:
    """Asked for, it is refused with the reason; else the model goes without."""
    target = load_model(save_headed("qwen3_next", tmp_path, lambda weights: weights.__delitem__("mtp.fc.weight")))

    assert load_draft(settings(target), target, lambda phase: None) is None
    with pytest.raises(ModelUnsupported, match="its MTP layer cannot be used .*weights are missing"):
        load_draft(settings(target, drafter="mtp"), target, lambda phase: None)
