"""The C++ attention kernel: its selection, the check at load, the fallback to torch, and agreement with torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.kernels import dispatch, reference
from engine.kernels.attention_input import AttentionFunction, AttentionInput
from engine.kernels.cpu.build import libraries
from engine.load.load import LoadedModel
from engine.run.packed import PackedRunner
from engine.run.runner import runners_of
from kvcache.cache import Cache
from kvcache.spec import AttentionRange, LayerSpec, Span
from tests.engine.kit.mixes import mix, prompts
from tests.engine.kit.models import END, VOCABULARY, Reference, core, load_model, save_tokenizer
from tests.engine.kit.play import Job, ask, play
from tests.engine.test_oracle import run
from tests.selection import quick

RANGES = (AttentionRange(), AttentionRange("window", 9), AttentionRange("chunk", 12))
Folder = Callable[[str], Path]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def fresh() -> Iterator[None]:
    """No kernel is selected before or after the test."""
    dispatch.best_attention.cache_clear()
    yield
    dispatch.best_attention.cache_clear()


@pytest.fixture(scope="module")
def native() -> AttentionFunction:
    """The kernel of this machine."""
    try:
        return dispatch.native_attention()
    except libraries.LibraryUnavailable as error:
        pytest.skip(error.reason)


@pytest.fixture(scope="session")
def sinks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with an attention sink for each head, and a window in every other layer."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    config = transformers.GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
        bos_token_id=256,
        eos_token_id=END,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    model.generation_config.eos_token_id = END
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def attending(loaded: LoadedModel) -> AttentionFunction:
    """What a model's layers attend with."""
    runner = runners_of(loaded.runner)[-1]
    assert isinstance(runner, PackedRunner)
    return runner.attend


@pytest.mark.parametrize("family", quick(("gemma3", "gpt_oss"), ("llama", "gemma2", "gemma3", "mistral", "gpt_oss")))
def test_cpp_attention_text_equals_generate_in_any_batch(
    family: str, folder: Folder, sinks: Path, native: AttentionFunction
) -> None:
    """Windows, softcaps and sinks too: in float32 tokens differ from transformers' at ties only."""
    place = sinks if family == "gpt_oss" else folder(family)
    models = cache(lambda _, dtype: load_model(place, dtype))
    references = cache(lambda _, dtype: Reference(place, getattr(torch, dtype)))

    assert attending(models(family, "float32")) is not reference.attend
    assert 100 < run(models, references, family, range(3000, 3005), "float32")
    assert 20 < run(models, references, family, range(3010, 3012), "float32", scarce=True)


@pytest.mark.parametrize("stored", ["int8", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_cpp_attention_equals_torch_over_int8_and_bfloat16_cells(
    family: str, stored: str, folder: Folder, native: AttentionFunction
) -> None:
    """Equal up to the first near tie of two tokens."""
    settings = {"dtype": "float32", "kv_dtype": stored}
    native_model, torch_model = (
        load_model(folder(family), **settings, kernels=kernels) for kernels in ("auto", "torch")
    )
    some = mix(1, prompts(5))
    jobs = [Job(job.request, job.arrives) for job in some.jobs]

    actual, expected = play(some.core(native_model), jobs), play(some.core(torch_model), jobs)

    assert attending(torch_model) is reference.attend is not attending(native_model)
    equal = [actual[name].tokens == expected[name].tokens for name in actual]
    assert len(equal) - 1 <= sum(equal)


class Rows:
    """One layer's queries, keys and values of a text, and its outputs over a cache."""

    def __init__(
        self, attend: AttentionFunction, attention_range: AttentionRange, stored: torch.dtype, length: int
    ) -> None:
        generator = torch.Generator().manual_seed(length)
        self.query, self.key, self.value = (torch.randn(heads, length, 16, generator=generator) for heads in (6, 2, 2))
        self.length, self._attend, self._attention_range, self._stored = length, attend, attention_range, stored

    def cache(self) -> Cache:
        """An empty cache."""
        spec = LayerSpec(2, 16, 16, self._attention_range)
        return Cache([spec], slots=3, capacity=self.length, cells=4 * self.length, dtype=self._stored)

    def compute(self, cache: Cache, *ends: tuple[int, int]) -> list[Tensor]:
        """In one forward, extend each slot to a length: the outputs [tokens, heads, width] of each slot."""
        spans = [Span(slot, cache.cached_length(slot), end - cache.cached_length(slot)) for slot, end in ends]
        query, key, value = (
            torch.cat([whole[:, span.start : span.stop] for span in spans], 1)
            for whole in (self.query, self.key, self.value)
        )
        with cache.forward(spans) as forward:
            forward.store_kv(0, key, value)
            cells = (*forward.layer_kv(0), forward.segments(0), forward.attention_range(0))
            output = self._attend(AttentionInput(query, *cells, 0.25))
        return list(output.split([span.length for span in spans]))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("attention_range", RANGES, ids=lambda attention_range: attention_range.kind)
def test_attention_of_a_row_is_batch_invariant(
    attention_range: AttentionRange, stored: torch.dtype, native: AttentionFunction
) -> None:
    """In one forward, in chunks, beside other sequences, in scattered cells, or behind a copied prefix."""
    rows = Rows(native, attention_range, stored, 90)
    (whole,) = rows.compute(rows.cache(), (0, 90))

    crowded = rows.cache()
    parts = [rows.compute(crowded, (0, end), (1, end + 1)) for end in (1, 2, 30, 31, 64)]
    cached_length = crowded.copy_prefix(0, 2, 64)
    parts += [rows.compute(crowded, (0, end), (1, end + 1)) for end in (70, 89)]
    (behind,) = rows.compute(crowded, (2, 90))

    assert 64 == cached_length
    assert torch.equal(whole[:89], torch.cat([first for first, _ in parts]))
    assert torch.equal(whole, torch.cat([second for _, second in parts]))
    assert torch.equal(whole[64:], behind)


def test_kernel_that_fails_the_self_test_is_replaced_by_torch(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(inputs: AttentionInput) -> Tensor:
        return reference.attend(inputs) * 1.1

    monkeypatch.setattr(dispatch, "best_attention", lambda: wrong)
    with caplog.at_level(logging.WARNING, "cellar.engine"):
        loaded = load_model(folder("llama"), "float32")

    assert attending(loaded) is reference.attend
    assert [
        "attends in torch operations, because the attention kernel changes its logits" in line
        for line in caplog.messages
    ] == [True]


@pytest.mark.usefixtures("fresh")
def test_torch_serves_without_a_compiler(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One log line gives the reason, however many models are loaded."""
    monkeypatch.setattr(libraries, "PREBUILT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(libraries, "variants", lambda kernel: ("avx2", "generic"))
    with caplog.at_level(logging.WARNING, "cellar.engine"):
        loaded = [load_model(folder("llama"), "float32") for _ in range(2)][-1]

    assert attending(loaded) is reference.attend
    assert 3 == len(play(core(loaded), [Job(ask("one", (1, 2, 3), 3))])["one"].tokens)
    assert ["no C++ compiler on the PATH" in line for line in caplog.messages] == [True]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("variants", "library", "reason"),
    [
        (("generic",), b"", "needs AVX2, AVX-512 or NEON"),
        (("avx2", "generic"), b"no library", "cannot be loaded"),
    ],
)
def test_kernel_library_that_cannot_load_is_not_used(
    variants: tuple[str, ...], library: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor without wide vectors, and a file refused by the system."""
    file = tmp_path / "library.so"
    file.write_bytes(library)
    monkeypatch.setattr(libraries, "variants", lambda kernel: variants)
    monkeypatch.setattr(libraries, "library", lambda kernel: file)

    with pytest.raises(libraries.LibraryUnavailable, match=reason):
        dispatch.native_attention()
    assert dispatch.best_attention() is reference.attend


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_dtype_without_a_kernel_builds_no_library(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "best_attention", lambda: pytest.fail("nobody needs it"))

    assert dispatch.attention_kernel(dtype, dtype) is reference.attend
