"""Adapters in one batch: each text is PEFT's alone, with the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.convert.convert import convert
from engine.core import Core
from engine.draft.loading import make_speculation
from engine.errors import AdapterUnsupported
from engine.load.load import LoadedModel
from engine.load.read.gguf_model import read_gguf_config, read_gguf_model
from engine.step.input import StepFeatures, StepInput
from engine.types.events import Finished
from engine.types.request import Request
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine.convert.checkpoints import conversion
from tests.engine.gguf.files import write_wide
from tests.engine.kit.adapters import KINDS, AdaptedReference, save_adapter
from tests.engine.kit.models import core, load_model
from tests.engine.kit.play import Answer, Job, ask, play
from tests.selection import quick

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("", *(f"adapter{number}" for number in range(len(KINDS))))
PROMPT = tuple(range(30, 62))
COUNT = 12
GGUF = "q4_k_m"
FORMATS = ("none", "int8", GGUF)

Folder = Callable[[str], Path]
Adapted = Callable[..., LoadedModel]
Bases = Callable[[bool], "Base"]
References = Callable[[bool, torch.dtype, str], AdaptedReference]


@dataclass(frozen=True)
class Base:
    """A model without adapters, the folder of its dequantised weights, and the folder of an adapter of each kind."""

    source: Path
    dequantised: Path
    adapters: dict[str, Path]


@pytest.fixture(scope="module")
def bases(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """A model in floats, or a GGUF file in Q4_K_M."""

    def save(is_gguf: bool) -> Base:
        root = tmp_path_factory.mktemp("adapters")
        source = dequantised = folder("llama")
        if is_gguf:
            source, dequantised = root / "base.gguf", root / "dequantised"
            write_wide("llama", root)
            convert(conversion(root / "model", source, GGUF))
            model, _, _ = read_gguf_model(source, read_gguf_config(source), torch.float32)
            model.save_pretrained(dequantised)
        named = enumerate(zip(NAMES[1:], KINDS, strict=True))
        saved = {name: save_adapter(dequantised, root / name, kind, seed) for seed, (name, kind) in named}
        return Base(source, dequantised, saved)

    return cache(save)


@pytest.fixture(scope="module")
def adapters(bases: Bases) -> dict[str, Path]:
    """The folder of an adapter of each kind, by name."""
    return bases(False).adapters


@pytest.fixture(scope="module")
def references(bases: Bases) -> References:
    """The model in floats or of the GGUF file with one of the adapters, or without one, in PEFT."""

    @cache
    def load(is_gguf: bool, dtype: torch.dtype, name: str) -> AdaptedReference:
        base = bases(is_gguf)
        return AdaptedReference(base.dequantised, base.adapters.get(name), dtype)

    return load


@pytest.fixture(scope="module")
def adapted(bases: Bases) -> Callable[[str, str], LoadedModel]:
    """The model with all adapters, by dtype and format of its weights, and by kernels."""

    @cache
    def load(dtype: str, quantize: str = "none", kernels: str = "auto") -> LoadedModel:
        base = bases(quantize == GGUF)
        lora = tuple(f"{name}={path}" for name, path in base.adapters.items())
        quantize = "none" if quantize == GGUF else quantize
        return load_model(base.source, dtype, quantize=quantize, kernels=kernels, lora=lora, drafter="none")

    return load


def requests(names: Sequence[str] = NAMES, count: int = COUNT, **fields: object) -> list[Request]:
    """A request for each adapter."""
    return [ask(name, PROMPT, count, adapter=name, logprobs=1, ignore_eos=True, **fields) for name in names]


def answered(own: Core, asked: Sequence[Request]) -> dict[str, Answer]:
    """The answers, all arrived at once."""
    return play(own, [Job(request) for request in asked])


def bits(answers: dict[str, Answer]) -> dict[str, list[tuple[int, float]]]:
    """Tokens and log-probabilities, which show every bit of a logit."""
    return {
        name: [(entry.chosen.token, entry.chosen.logprob) for entry in answer.logprobs if entry is not None]
        for name, answer in answers.items()
    }


def alone(model: LoadedModel, asked: Sequence[Request], **settings: int) -> dict[str, list[tuple[int, float]]]:
    """Each request in an engine of its own."""
    return {request.id: bits(answered(core(model, slots=1, **settings), [request]))[request.id] for request in asked}


@pytest.mark.parametrize(
    ("dtype", "quantize", "kernels"),
    [("float32", "none", "auto"), ("float32", "none", "torch"), ("float64", "none", "auto"), ("float32", GGUF, "auto")],
)
def test_texts_of_one_batch_are_those_of_peft(
    dtype: str, quantize: str, kernels: str, adapted: Adapted, references: References
) -> None:
    """Adapters of all kinds and the base, in one batch; of a GGUF file with its dequantised weights."""
    model = adapted(dtype, quantize, kernels)
    answers = answered(core(model, slots=len(NAMES)), requests())

    for name in NAMES:
        reference = references(quantize == GGUF, getattr(torch, dtype), name)
        assert answers[name].tokens == reference.greedy(PROMPT, COUNT), name
    assert len({tuple(answer.tokens) for answer in answers.values()}) == len(NAMES)


@pytest.mark.parametrize(("dtype", "quantize", "error"), [("float64", "none", 1e-9), ("float32", GGUF, 1e-4)])
def test_logits_are_those_of_peft(
    dtype: str, quantize: str, error: float, adapted: Adapted, references: References
) -> None:
    """In one batch, relative to the largest logit."""
    model = adapted(dtype, quantize)
    kind = getattr(torch, dtype)
    cache = Cache([layer.spec for layer in model.runner.layers], slots=9, capacity=32, cells=9 * 32, dtype=kind)
    spans = [Span(slot, 0, len(PROMPT)) for slot in range(len(NAMES))]
    tokens = PROMPT * len(NAMES)
    with cache.forward(spans) as forward:
        step = StepInput(forward, tokens, range(len(tokens)), adapters=range(len(NAMES)))
        logits = model.runner.run(step).logits.split(len(PROMPT))

    for name, rows in zip(NAMES, logits, strict=True):
        reference = references(quantize == GGUF, kind, name)
        assert (rows - reference.logits(PROMPT)).abs().max() < error * rows.abs().max(), name


@pytest.mark.parametrize(
    ("quantize", "kernels"),
    quick(
        [("none", "auto"), ("int8", "auto"), (GGUF, "auto"), ("none", "torch")],
        [(quantize, kernels) for quantize in FORMATS for kernels in ("auto", "torch")],
    ),
)
def test_bits_do_not_depend_on_the_batch(quantize: str, kernels: str, adapted: Adapted) -> None:
    """Alone, batched, in small chunks, from cached prefixes, after preemptions; in each format of the weights."""
    model = adapted("float32", quantize, kernels)
    expected = alone(model, requests())
    batched = core(model, slots=len(NAMES))

    assert bits(answered(batched, requests())) == expected
    again = answered(batched, requests())
    assert bits(again) == expected
    assert all(answer.started[0].cached_tokens == len(PROMPT) - 1 for answer in again.values())
    assert bits(answered(core(model, slots=3, chunk=5), requests())) == expected
    preempting = core(model, slots=4, cells=120)
    assert bits(answered(preempting, requests())) == expected
    assert preempting.stats().preemptions_total > 0
    assert model.info.batch_invariant


@pytest.mark.parametrize("quantize", FORMATS)
def test_bits_of_shifted_contexts_do_not_depend_on_the_batch(quantize: str, adapted: Adapted) -> None:
    """Alone, batched and in small chunks; until the first shift they are those of a longer context."""
    model = adapted("float32", quantize)
    asked = requests(count=24, overflow="shift", keep=4)
    expected = alone(model, asked, context=40)

    batched = answered(core(model, slots=len(NAMES), context=40), asked)
    assert bits(batched) == expected
    assert bits(answered(core(model, slots=3, context=40, chunk=5), asked)) == expected
    longer = bits(answered(core(model, slots=len(NAMES)), asked))
    for name, answer in batched.items():
        assert isinstance(answer.end, Finished)
        assert answer.end.usage.context_shifts > 0
        assert expected[name][:8] == longer[name][:8], name
        assert expected[name] != longer[name], name


@pytest.mark.parametrize("quantize", FORMATS)
def test_drafts_change_no_text(quantize: str, adapted: Adapted) -> None:
    """Drafts of n-gram lookup: of each adapter's own outputs."""
    model = adapted("float32", quantize)
    config = EngineConfig(model=model.info.folder, drafter="lookup", draft_tokens=4)
    speculation = make_speculation(config, model, None, lambda: 0.0, lambda phase: None)
    drafting = core(model, slots=len(NAMES), speculation=speculation)
    repeated = PROMPT[:8] * 4
    asked = [ask(name, repeated, 24, adapter=name, ignore_eos=True) for name in NAMES]
    expected = {name: answer.tokens for name, answer in answered(core(model, slots=9), asked).items()}

    for _ in range(2):
        assert {name: answer.tokens for name, answer in answered(drafting, asked).items()} == expected
    assert sum(sum(counts.accepted) for counts in drafting.stats().drafts) > 0


def test_prefixes_are_shared_within_an_adapter_only(adapted: Adapted) -> None:
    """A prompt of one adapter is cached for no other one, nor for the base."""
    own = core(adapted("float32"), slots=2)
    answered(own, requests(["adapter1"]))

    for name, cached in (("", 0), ("adapter0", 0), ("adapter1", len(PROMPT) - 1)):
        assert answered(own, requests([name]))[name].started[0].cached_tokens == cached


def test_pooled_states_are_those_of_the_adapter(adapted: Adapted) -> None:
    """Embeddings run the same forward."""
    own = core(adapted("float32"), slots=2)
    pooled = answered(own, [ask(name, PROMPT, 0, adapter=name, pooling="mean") for name in ("", "adapter1")])

    vectors = [pooled[name].embedded[0] for name in ("", "adapter1")]
    assert vectors[0] != vectors[1]


def test_adapters_are_counted_as_weights(adapted: Adapted, loaded: Callable[..., LoadedModel]) -> None:
    """In the memory plan, and listed with the model."""
    model, base = adapted("float32"), loaded("llama", "float32")

    assert model.memory.weights_bytes == base.memory.weights_bytes + sum(info.bytes for info in model.info.adapters)
    assert [info.name for info in model.info.adapters] == list(NAMES[1:])
    assert [info.rank for info in model.info.adapters] == [8, 16, 4, 8, 8, 1, 64, 24]


@pytest.mark.parametrize("quantize", FORMATS)
def test_the_native_step_computes_adapters(quantize: str, loaded: Callable[..., LoadedModel], adapted: Adapted) -> None:
    """Of a model that was loaded with adapters."""
    model = adapted("float32", quantize)

    assert model.info.not_native_reason is None
    assert model.runner.runners[0].supports(StepFeatures(adapters=True)) is None
    assert loaded("llama", "float32").runner.runners[0].supports(StepFeatures(adapters=True)) == (
        "the native step has no adapters"
    )


@pytest.mark.parametrize(
    ("family", "target", "text"),
    [
        ("deepseek_v3", "kv_b_proj", r"does not call its layer .*kv_b_proj for every token"),
        ("llama", "lm_head", "lm_head"),
    ],
)
def test_layers_that_are_not_called_for_every_token_are_refused(
    family: str, target: str, text: str, folder: Folder, tmp_path: Path
) -> None:
    """A part of the adapter would be missing silently."""
    path = save_adapter(folder(family), tmp_path / "adapter", {"r": 2, "target_modules": [target]})

    with pytest.raises(AdapterUnsupported, match=text):
        load_model(folder(family), "float32", lora=(f"mine={path}",), drafter="none")


def test_a_model_that_runs_one_sequence_at_a_time_has_no_adapters(
    adapters: dict[str, Path], folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused at the start."""
    from engine.run.sequential import SequentialRunner

    monkeypatch.setattr("engine.load.check.checking.find_runner", lambda name, model, traits: SequentialRunner(model))
    with pytest.raises(AdapterUnsupported, match="runs packed"):
        load_model(folder("llama"), "float64", lora=(f"mine={adapters['adapter0']}",), drafter="none")
