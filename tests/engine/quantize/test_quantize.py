"""Models with quantised weights: which layers are replaced, that texts stay functions of the request, what is lost."""

from __future__ import annotations

import gc
import logging
import math
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from engine.config import EngineConfig
from engine.errors import ModelUnsupported
from engine.kernels import linear
from engine.kernels.packing import pack
from engine.load.load import LoadedModel, load
from engine.quantize import quantize, store
from engine.quantize.layers import QuantizedLinear, SharedInputGroup
from engine.quantize.plan import LayerSurvey, QuantizationPlan
from engine.quantize.store import WeightStore
from models.recipe.evaluate import held_out_texts
from tests.engine.mixes import mix, prompts
from tests.engine.models import Reference, core, load_model
from tests.engine.play import Job, play
from tests.engine.test_oracle import run

Folder = Callable[[str], Path]
# What perplexity may rise by.
ALLOWED = {"int8": 1.005, "int4": 1.05}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def quantized(loaded: LoadedModel) -> dict[str, QuantizedLinear]:
    """The layers that were replaced."""
    return {name: one for name, one in loaded.model.named_modules() if isinstance(one, QuantizedLinear)}


class QuantizedReference(Reference):
    """transformers alone, with its own cache and attention, over the same quantised layers."""

    def __init__(self, folder: Path, dtype: str, quantize: str) -> None:
        self.model = load_model(folder, dtype, quantize=quantize).model
        self.model.set_attn_implementation("sdpa" if self.model._supports_sdpa else "eager")
        self.greedy = cache(self._greedy)


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "deepseek_v3", "qwen3_next", "mamba"])
def test_any_mix_says_what_generate_says_alone(folder: Folder, family: str) -> None:
    """With int8 weights, in float64, not one token differs from the same quantised model in transformers."""
    models = cache(lambda _, dtype: load_model(folder(family), dtype, quantize="int8"))
    references = cache(lambda _, dtype: QuantizedReference(folder(family), dtype, "int8"))

    assert 30 < run(models, references, family, range(1), "float64")
    assert quantized(models(family, "float64"))


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gpt_neox", "mistral", "gemma3", "jamba", "llama4"])
def test_many_mixes_say_what_generate_says_alone(folder: Folder, family: str, quantize: str) -> None:
    """The same law over more families and mixes, and with too few cells."""
    models = cache(lambda _, dtype: load_model(folder(family), dtype, quantize=quantize))
    references = cache(lambda _, dtype: QuantizedReference(folder(family), dtype, quantize))
    judged = run(models, references, family, range(40), "float64")
    judged += run(models, references, family, range(2000, 2010), "float64", scarce=True)

    assert 1000 < judged


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_in_float32_a_mix_says_what_each_says_alone(folder: Folder, family: str, quantize: str) -> None:
    """Rounded rows make small differences large, so there must be none: chunks and neighbours leave every bit alone."""
    loaded = load_model(folder(family), "float32", quantize=quantize)
    for seed in range(2):
        some = mix(seed, prompts(5))
        answers = play(some.core(loaded), some.jobs)
        for job in some.jobs:
            alone = play(core(loaded, slots=1, chunk=256), [Job(job.request)])[job.request.id].tokens
            said = answers[job.request.id].tokens

            assert said == (alone if job.leaves is None else alone[: len(said)])


def surveyed(model: nn.Module, *batches: Tensor) -> QuantizationPlan:
    """What a survey finds that sees a model run."""
    survey = LayerSurvey(model)
    for rows in batches or (torch.randn(3, 64),):
        model(rows)
    return survey.close()


def test_torch_computes_the_same_weights(folder: Folder) -> None:
    """Without a kernel the model says nearly the same: roundings differ, and codes of rows with them."""
    rows = torch.tensor([[5, 6, 7, 8, 200, 3, 9]])
    with torch.inference_mode():
        plain, kernel, others = (
            load_model(folder("llama"), "float32", **settings).model(input_ids=rows, use_cache=False).logits[0]
            for settings in ({}, {"quantize": "int8"}, {"quantize": "int8", "kernels": "torch"})
        )

    lost = float((kernel - plain).norm() / plain.norm())
    assert 1e-4 < lost < 0.05
    assert float((others - kernel).norm() / plain.norm()) < lost


class Block(nn.Module):
    """A layer as models have them, and some that must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(64, 64), nn.Linear(64, 32, bias=False), nn.Linear(64, 32)
        self.out, self.router, self.mixed = nn.Linear(32, 64), nn.Linear(64, 2), nn.Linear(64, 64)
        self.unused, self.convolution = nn.Linear(64, 64), nn.Conv1d(64, 64, 1)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [count, 64]; one layer's weight is read here, another's type."""
        mean = (self.query(rows).mean() + self.key(rows).mean()) * self.value(rows)
        made = self.out(mean.to(self.out.weight.dtype))
        return self.router(made).sum() + made @ self.mixed.weight.T


def test_layers_that_get_the_same_rows_are_found_together() -> None:
    """Query, key and value are siblings; what is small, unused, or read by the model itself stays."""
    choice = surveyed(block := Block())

    assert [["query", "key", "value"], ["out"]] == [[layer.name for layer in group] for group in choice.groups]
    assert {"not in use": 1, "small, or routers": 1, "the model reads their weights itself": 1} == choice.stay
    assert isinstance(block.query, nn.Linear)
    assert isinstance(block.mixed, nn.Linear)


def test_rows_that_are_changed_between_two_calls_are_not_the_same() -> None:
    """The very tensor with other numbers in it makes no siblings."""

    class Changing(Block):
        def forward(self, rows: Tensor) -> Tensor:
            first = self.query(rows)
            rows += 1
            return first.sum() + self.key(rows).sum() + self.value(rows).sum()

    groups = surveyed(Changing()).groups

    assert [["query"], ["key", "value"]] == [[layer.name for layer in group] for group in groups]


def test_who_came_together_once_must_do_so_always() -> None:
    """Layers that are called with different companions are on their own."""

    class Choosing(Block):
        def forward(self, rows: Tensor) -> Tensor:
            second = self.key if rows.shape[0] > 3 else self.value
            return self.query(rows).sum() + second(rows).sum()

    groups = surveyed(Choosing(), torch.randn(3, 64), torch.randn(4, 64)).groups

    assert [["query"], ["key"], ["value"]] == [[layer.name for layer in group] for group in groups]


def test_a_layer_in_two_places_is_replaced_in_both(tmp_path: Path) -> None:
    """Shared layers stay shared."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Block()
            self.second = self.first.query

        def forward(self, rows: Tensor) -> Tensor:
            return self.first(rows).sum() + self.second(rows).sum()

    model = Shared()
    quantize.quantize(model, surveyed(model), WeightStore("a", 8, tmp_path), linear.prepare)

    assert isinstance(model.second, QuantizedLinear)
    assert model.second is model.first.query


def test_a_replaced_layer_computes_what_it_did() -> None:
    """Nearly: with its bias, for rows of any dimensions, for no rows too."""
    torch.manual_seed(0)
    layer, rows = nn.Linear(64, 48), torch.randn(2, 3, 64)
    model = nn.Sequential(layer)
    expected = layer(rows)

    quantize.quantize(model, surveyed(model), WeightStore("a", 8), linear.prepare)

    assert isinstance(model[0], QuantizedLinear)
    torch.testing.assert_close(model(rows), expected, rtol=0, atol=0.02)
    assert (0, 48) == model(rows[:0, 0]).shape


def test_siblings_compute_once_for_the_same_rows() -> None:
    """And anew for others, also for some whose siblings were never asked: nothing of theirs is given away."""
    calls: list[Tensor] = []

    def multiply(rows: Tensor) -> list[Tensor]:
        calls.append(rows)
        return linear.multiply(rows, matrices)

    torch.manual_seed(0)
    matrices = [pack(torch.randn(16, 32), 8) for _ in range(3)]
    siblings, first, second = SharedInputGroup(multiply), torch.randn(2, 32), torch.randn(2, 32)
    asked = [(0, first), (1, first), (0, second), (2, second), (1, first), (1, first), (0, first)]

    products = [siblings.product(number, rows) for number, rows in asked]

    expected = [linear.multiply(rows, [matrices[number]])[0] for number, rows in asked]
    assert [True] * 7 == [torch.equal(*pair) for pair in zip(products, expected, strict=True)]
    assert 4 == len(calls)


@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), ("llama", False)])
def test_the_head_is_quantised_and_the_embedding_is_not(folder: Folder, family: str, tied: bool) -> None:
    """Where both are one matrix, the embedding keeps it, and the count of parameters counts it once."""
    plain, loaded = load_model(folder(family), "float32"), load_model(folder(family), "float32", quantize="int8")

    assert tied == plain.model.config.tie_word_embeddings
    assert isinstance(loaded.model.get_output_embeddings(), QuantizedLinear)
    assert torch.equal(plain.model.get_input_embeddings().weight, loaded.model.get_input_embeddings().weight)
    assert plain.info.parameters == loaded.info.parameters
    assert ("float32", "float32, int8 weights") == (plain.info.dtype, loaded.info.dtype)


def test_the_plan_counts_what_weights_take_now(folder: Folder) -> None:
    """And what lies on the shelf of the plain model is not read."""
    plain, loaded = (load_model(folder("llama"), "float32", quantize=kind) for kind in ("none", "int8"))
    model = loaded.model
    expected = sum(one.nbytes for one in model.parameters())
    expected += sum(layer.codes.nbytes + layer.scales.nbytes for layer in quantized(loaded).values())

    assert expected == loaded.memory.weights_bytes < plain.memory.weights_bytes
    assert plain.identity != loaded.identity


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_file_of_the_model_stays_mapped(folder: Folder, tmp_path: Path) -> None:
    """What is quantised does not need the checkpoint, which would count as memory of the process."""
    own = Path(shutil.copytree(folder("llama"), tmp_path / "own"))
    plain = load_model(own, "float32")

    assert str(own) in Path("/proc/self/maps").read_text()
    del plain
    gc.collect()
    loaded = load_model(own, "float32", quantize="int8")

    assert loaded.memory.weights_bytes
    assert str(own) not in Path("/proc/self/maps").read_text()


def test_routers_stay(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    """The start-up log says so."""
    with caplog.at_level(logging.INFO, "cellar.engine"):
        loaded = load_model(folder("qwen3_next"), "float32", quantize="int8")

    assert not [name for name in quantized(loaded) if name.endswith("gate")]
    assert "linear layers (small, or routers)" in caplog.text


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused_in_words(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    """Should one hide where the self-test does not look."""
    spoilt = quantize.pack
    monkeypatch.setattr(quantize, "pack", lambda weight, *others: spoilt(weight.clone().fill_(wrong), *others))

    with pytest.raises(ModelUnsupported, match="cannot be quantised: a weight is infinite or no number"):
        load_model(folder("llama"), "float32", quantize="int4")


def test_quantised_weights_are_for_a_cpu() -> None:
    """A setting that would do nothing is refused."""
    with pytest.raises(ValueError, match="quantize int8 is for the device cpu"):
        EngineConfig(quantize="int8", device="cuda")


def test_auto_leaves_small_models_alone_and_counts_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 bits where that fits well, else 4; none where there is little to gain, or no kernel."""
    monkeypatch.setattr(quantize, "best_linear", lambda: lambda matrices: None)
    small = surveyed(nn.Sequential(nn.Linear(64, 64)))
    big = QuantizationPlan(small.groups * 2**14, small.stay)

    assert 2**26 == sum(layer.weight.numel() for layer in big.layers)
    assert [None, 8, 4] == [
        quantize.bits_for("auto", choice, room) for choice, room in ((small, 2**30), (big, 2**30), (big, 2**26))
    ]
    assert [None, 8, 4] == [quantize.bits_for(kind, small, 2**30) for kind in ("none", "int8", "int4")]
    monkeypatch.setattr(quantize, "best_linear", lambda: linear.prepare)

    assert quantize.bits_for("auto", big, 2**30) is None


@pytest.fixture
def tiny_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are worth their while however small."""
    monkeypatch.setattr(store, "MIN_BYTES", 0)


@pytest.mark.usefixtures("tiny_files")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_model_is_quantised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """The second start reads what the first made, and computes the same, bit for bit."""
    torch.manual_seed(0)
    first, second, rows = Block(), Block(), torch.randn(5, 64)
    second.load_state_dict(first.state_dict())
    quantize.quantize(first, surveyed(first), WeightStore("a", bits, tmp_path), linear.prepare)  # type: ignore[arg-type]
    monkeypatch.setattr(quantize, "pack", lambda *_: pytest.fail("it was there"))

    quantize.quantize(second, surveyed(second), WeightStore("a", bits, tmp_path), linear.prepare)  # type: ignore[arg-type]

    assert torch.equal(first(rows), second(rows))
    assert 1 == len(list(tmp_path.iterdir()))
    with safe_open(next(tmp_path.iterdir()), framework="pt") as content:
        assert "query.codes" in content.keys()  # noqa: SIM118


@pytest.mark.usefixtures("tiny_files")
@pytest.mark.parametrize("content", [b"", b"\xff" * 100, None], ids=["empty", "noise", "half"])
def test_a_spoilt_file_is_made_anew(tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be read is as good as not there, but a line tells of it."""
    own, shapes = WeightStore("a", 8, tmp_path), {"layer": (40, 70)}
    packed = pack(torch.randn(40, 70), 8)
    own.write({"layer": packed})
    whole = own.file.read_bytes()
    own.file.write_bytes(whole[: len(whole) // 2] if content is None else content)

    assert own.read(shapes) is None
    assert "is not read" in caplog.text
    own.write({"layer": packed})
    found = own.read(shapes)
    assert found is not None
    assert torch.equal(packed.codes, found["layer"].codes)


@pytest.mark.usefixtures("tiny_files")
def test_files_of_other_models_and_formats_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights, other bits, other layers, another order of codes."""
    WeightStore("a", 8, tmp_path).write({"layer": pack(torch.randn(40, 70), 8)})
    shapes = {"layer": (40, 70)}

    assert WeightStore("a", 8, tmp_path).read(shapes) is not None
    assert WeightStore("b", 8, tmp_path).read(shapes) is None
    assert WeightStore("a", 4, tmp_path).read(shapes) is None
    assert WeightStore("a", 8, tmp_path).read({"layer": (40, 700)}) is None
    assert WeightStore("a", 8, tmp_path).read({"other": (40, 70)}) is None
    monkeypatch.setattr(store, "FORMAT", store.FORMAT + 1)
    assert WeightStore("a", 8, tmp_path).read(shapes) is None


@pytest.mark.usefixtures("tiny_files")
def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model serves all the same, and small ones are not kept at all."""
    (tmp_path / "file").write_text("in the way")

    WeightStore("a", 8, tmp_path / "file").write({"layer": pack(torch.randn(40, 70), 8)})

    assert "not kept for the next start" in caplog.text


def test_small_models_leave_no_files(tmp_path: Path) -> None:
    """They are made as fast as they are read."""
    WeightStore("a", 8, tmp_path).write({"layer": pack(torch.randn(40, 70), 8)})

    assert [] == list(tmp_path.iterdir())


@cache
def bundled(quantize: str) -> LoadedModel:
    """The bundled model in float32."""
    return load(EngineConfig(quantize=quantize, context=1024, slots=1), lambda phase: None)  # type: ignore[arg-type]


def perplexity(loaded: LoadedModel, texts: list[list[int]]) -> float:
    """Of texts, by the model's own forward."""
    loss, count = 0.0, 0
    with torch.inference_mode():
        for text in texts:
            logits = loaded.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, :-1]
            loss += float(nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="sum"))
            count += len(text) - 1
    return math.exp(loss / count)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_the_bundled_model_loses_little(quantize: str) -> None:
    """Perplexity over 50 held-out conversations rises by at most half a per cent with 8 bits, by 5 with 4."""
    some = held_out_texts(50)

    assert perplexity(bundled(quantize), some) <= ALLOWED[quantize] * perplexity(bundled("none"), some)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_the_bundled_model_loses_little_over_all_held_out_text(quantize: str) -> None:
    """The same over all of it."""
    everything = held_out_texts(100_000)

    assert perplexity(bundled(quantize), everything) <= ALLOWED[quantize] * perplexity(bundled("none"), everything)


def test_what_quantising_would_bring_is_told(folder: Callable[[str], Path]) -> None:
    """Linear layers of float32 weights would be read as 8.5 or 4.5 bits; a quantised model has no such offer."""
    plain, quantised = (load_model(folder("llama"), "float32", quantize=kind).info for kind in ("none", "int8"))

    assert plain.quantization_estimate is not None
    assert {"int8": 8.5 / 32, "int4": 4.5 / 32} == dict(plain.quantization_estimate.relative_bytes)
    assert plain.quantization_estimate.auto is None
    assert quantised.quantization_estimate is None
