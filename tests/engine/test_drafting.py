"""The settings of speculative decoding: selected drafters, refused draft models, and tokens outside of a vocabulary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import EngineConfig
from engine.draft.loading import load_draft, make_speculation
from engine.engine import Engine
from engine.errors import DraftTooLarge, InvalidRequest, ModelMissing, ModelUnsupported
from engine.load.load import LoadedModel, load
from engine.types.events import Delta, Finished
from engine.types.request import Request, SamplingParams, SpeculationParams
from tests.engine.kit.models import CONTEXT, Models, core, save_model, save_tokenizer
from tests.engine.kit.play import Job, ask, play

BUNDLED_DRAFT = Path(__file__).parents[2] / "models" / "draft"

Folder = Callable[[str], Path]


def config(folder: Path, draft: Path | None, **changes: Any) -> EngineConfig:
    """A tiny model with a draft model."""
    name = None if draft is None else str(draft)
    return EngineConfig(model=str(folder), draft_model=name, **{"context": CONTEXT, "dtype": "float64", **changes})


def smaller(folder: Path, **changes: Any) -> Path:
    """A llama of another size."""
    save_model("llama", folder)
    settings = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(type(settings)(**{**settings.to_dict(), **changes})).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tokens", [0, 16, "auto"])
def test_drafts_have_up_to_sixteen_tokens(tokens: Literal["auto"] | int) -> None:
    """0 disables drafts unless a request sets them."""
    assert tokens == EngineConfig(draft_tokens=tokens).draft_tokens


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"draft_tokens": 17}, "between 0 and 16, not 17"),
        ({"draft_tokens": -1}, "between 0 and 16, not -1"),
        ({"drafter": "lookup", "draft_model": "small"}, "drafter lookup does not use the draft model small"),
        ({"drafter": "none", "draft_model": "small"}, "drafter none does not use the draft model small"),
        ({"drafter": "model", "model": "large"}, "name it with --draft-model"),
        ({"drafter": "mtp", "draft_model": "small"}, "drafter mtp does not use the draft model small"),
        ({"draft_quantize": "int8", "model": "large"}, "draft_quantize needs a draft model"),
        ({"draft_quantize": "int8", "drafter": "lookup"}, "draft_quantize needs a draft model"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, Any], word: str) -> None:
    """ValueError names the setting."""
    with pytest.raises(ValueError, match=word):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({}, ("lookup",)),
        ({"drafter": "lookup"}, ("lookup",)),
        ({"drafter": "none"}, ()),
        ({"draft": True}, ("lookup", "model")),
        ({"draft": True, "drafter": "model"}, ("model",)),
    ],
)
def test_settings_select_the_drafter(
    loaded: Models, folder: Folder, settings: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    """N-gram lookup is the default."""
    target, small = loaded("llama"), folder("gemma3")
    fields = {key: value for key, value in settings.items() if key != "draft"}
    asked = config(folder("llama"), small if settings.get("draft") else None, slots=2, **fields)

    draft = load_draft(asked, target, lambda phase: None)

    assert kinds == make_speculation(asked, target, draft, lambda: 0.0).kinds


@pytest.mark.parametrize(
    "settings",
    [
        {"drafter": "auto"},
        {"drafter": "model"},
        {"drafter": "model", "draft_tokens": 0},
        {"drafter": "model", "draft_quantize": "none", "draft_tokens": 3},
        {"drafter": "model", "draft_model": str(BUNDLED_DRAFT)},
    ],
)
def test_the_bundled_pair_drafts_by_default(settings: dict[str, Any]) -> None:
    """With each setting that permits it; settings of the model apply to its draft model too."""
    asked = EngineConfig(**{"context": 64, "slots": 1, "kernels": "torch", **settings})
    draft = load_draft(asked, load(asked, lambda phase: None), lambda phase: None)

    assert isinstance(draft, LoadedModel)
    assert BUNDLED_DRAFT == Path(draft.info.folder)


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path: Path, loaded: Models, folder: Folder) -> None:
    """The error names the first token that differs."""
    small = smaller(tmp_path / "small")
    file = small / "tokenizer.json"
    content = json.loads(Tokenizer.from_file(str(file)).to_str())
    words = content["model"]["vocab"]
    words["A"], words["B"] = words["B"], words["A"]
    file.write_text(json.dumps(content))

    with pytest.raises(
        ModelUnsupported, match=r"must share the tokenizer of the model: token \d+ is 'B' in it and 'A'"
    ):
        load_draft(config(folder("llama"), small), loaded("llama"), lambda phase: None)


def test_a_draft_model_beyond_memory_is_refused(
    loaded: Models, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of the model is subtracted first, and the error names the draft model."""
    target = loaded("llama")
    promised = target.memory.cache_bytes + target.memory.workspace_bytes
    asked = config(folder("llama"), folder("llama"))
    monkeypatch.setattr("engine.load.plan.memory.available_bytes", lambda _: promised + 2**18)

    with pytest.raises(
        DraftTooLarge, match=r"draft model .*llama' does not fit beside the model: .*--slots.*--drafter lookup"
    ):
        load_draft(asked, target, lambda phase: None)
    monkeypatch.setattr("engine.load.plan.memory.available_bytes", lambda _: promised + 2**30)
    assert load_draft(asked, target, lambda phase: None) is not None


def test_a_missing_draft_model_is_reported(tmp_path: Path, loaded: Models, folder: Folder) -> None:
    """In one line, as for the model itself."""
    with pytest.raises(ModelMissing, match="no such folder"):
        load_draft(config(folder("llama"), tmp_path / "absent"), loaded("llama"), lambda phase: None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelUnsupported, match="cannot serve the model"):
        load_draft(config(folder("llama"), tmp_path), loaded("llama"), lambda phase: None)


def test_a_missing_bundled_draft_is_an_error_on_request_only(loaded: Models) -> None:
    """The folder of this model has no draft model beside it."""
    target = loaded("llama")

    assert load_draft(EngineConfig(), target, lambda phase: None) is None
    with pytest.raises(ModelMissing, match="--draft-model"):
        load_draft(EngineConfig(drafter="model"), target, lambda phase: None)


@pytest.mark.parametrize("vocabulary", [262, 300])
def test_tokens_outside_the_other_vocabulary_are_ignored(
    tmp_path: Path, loaded: Models, folder: Folder, vocabulary: int
) -> None:
    """Families pad their vocabularies to different sizes."""
    small = smaller(tmp_path / "small", vocab_size=vocabulary)
    save_tokenizer(small)
    target, asked = loaded("llama"), config(folder("llama"), small, drafter="model", draft_tokens=4, slots=2)
    params = SamplingParams(temperature=1.0, seed=3, frequency_penalty=0.5, logit_bias=((270, 5.0),))
    job = Job(ask("a", (5, 270, 6, 271, 7), 24, sampling=params, ignore_eos=True))
    speculation = make_speculation(asked, target, load_draft(asked, target, lambda phase: None), lambda: 0.0)

    alone, drafted = play(core(target), [job])["a"], play(core(target, speculation=speculation), [job])["a"]

    assert isinstance(drafted.end, Finished)
    assert drafted.end.usage.accepted_tokens + drafted.end.usage.rejected_tokens > 0
    assert alone.tokens == drafted.tokens


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_request_sets_its_draft_tokens(loaded: Models, folder: Folder, tokens: int) -> None:
    """Here the setting of the engine is 0."""
    target, asked = loaded("llama"), config(folder("llama"), folder("llama"), drafter="model", draft_tokens=0, slots=2)
    speculation = make_speculation(asked, target, load_draft(asked, target, lambda phase: None), lambda: 0.0)
    engine = core(target, speculation=speculation)
    plain = ask("plain", (5, 6, 7), 13, ignore_eos=True)
    drafted = ask("drafted", (5, 6, 7), 13, ignore_eos=True, speculation=SpeculationParams(tokens=tokens))

    answers = play(engine, [Job(plain), Job(drafted)])

    counts = engine.stats().drafts[0]
    assert answers["plain"].tokens == answers["drafted"].tokens
    assert [rounds > 0 for rounds in counts.drafted] == [position < tokens for position in range(16)]
    assert counts.accepted == counts.drafted, "the model is its own draft"
    assert sum(counts.accepted) == answers["drafted"].end.usage.accepted_tokens  # type: ignore[union-attr]
    assert 0 == answers["plain"].end.usage.accepted_tokens  # type: ignore[union-attr]


def test_unknown_drafters_are_refused(folder: Folder) -> None:
    """By name; the phases of a load include the draft model."""
    phases: list[str] = []

    async def scene() -> None:
        engine = Engine(config(folder("llama"), folder("gemma3"), drafter="model", slots=2), phases.append)
        engine.start()
        try:
            await engine.wait_ready()
            assert ("model",) == engine.drafting.kinds
            assert engine.drafting.model is not None
            assert str(folder("gemma3")) == engine.drafting.model.name
            async with engine.open(_request("fine", "model")) as stream:
                assert any([isinstance(event, Delta) async for event in stream])
            with pytest.raises(InvalidRequest, match="has no drafter 'lookup', it has model") as raised:
                async with engine.open(_request("wrong", "lookup")):
                    pass
            assert "speculation.drafter" == raised.value.field
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(scene())

    assert "draft: weights" in phases
    assert phases.index("self-test") < phases.index("draft: resolve") < phases.index("ready")


def _request(name: str, drafter: Any) -> Request:
    return ask(name, (5, 6, 7), 4, ignore_eos=True, speculation=SpeculationParams(drafter))


def test_the_draft_model_s_prefixes_survive_a_restart(folder: Folder, loaded: Models, tmp_path: Path) -> None:
    """In the disk cache; the texts are equal."""
    settings = config(folder("llama"), folder("llama"), drafter="model", draft_tokens=4, disk_cache=str(tmp_path))
    target, prompt = loaded("llama"), tuple(range(60))
    texts, read = [], []
    for _ in range(2):
        draft = load_draft(settings, target, lambda phase: None)
        assert draft is not None
        speculation = make_speculation(settings, target, draft, lambda: 0.0)
        engine = core(target, speculation=speculation)
        before = sum(file.stat().st_size for file in tmp_path.glob("*/*.safetensors"))
        texts.append(play(engine, [Job(ask("one", prompt, 12))])["one"].tokens)
        while engine.flush_when_idle():
            pass
        read.append(sum(file.stat().st_size for file in tmp_path.glob("*/*.safetensors")) - before)

    assert texts[0] == texts[1]
    # The second process found all tokens and wrote none.
    assert read[0] > 0
    assert read[1] == 0


@pytest.mark.parametrize(("asked", "quantized"), [({}, "none"), ({"draft_quantize": "int8"}, "int8")])
def test_the_draft_model_alone_may_be_quantised(
    loaded: Models, folder: Folder, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], quantized: str
) -> None:
    """Its rounding does not affect the output."""
    seen = []
    target = loaded("llama")
    monkeypatch.setattr("engine.draft.loading.load", lambda settings, *_, **__: seen.append(settings) or target)

    load_draft(config(folder("llama"), folder("llama"), **asked), target, lambda phase: None)

    assert [quantized] == [settings.quantize for settings in seen]
