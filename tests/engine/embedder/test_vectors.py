"""Vectors equal transformers' output for the same files, in any batch."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, linear, normalize

from engine.errors import EmbedderTooLarge, ModelMissing, ModelUnsupported
from engine.types.request import EmbeddingInput
from tests.engine.embedder.folders import LONGEST, QUERY, TEXTS, WIDTH, lay_out, load, save_embedder, states, write

Folder = Callable[[str], Path]
# Tolerance against transformers in float32 for one text alone.
EXACT: dict[str, float] = {"rtol": 0, "atol": 1e-5}
# Largest change of a vector of length 1 by other texts of its batch.
NEIGHBOURS = 1e-6


def mean(found: Tensor) -> Tensor:
    return found.mean(0)


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "cls_token": lambda found: found[0],
    "mean_tokens": mean,
    "max_tokens": lambda found: found.max(0).values,
    "mean_sqrt_len_tokens": lambda found: found.sum(0) / math.sqrt(len(found)),
    "lasttoken": lambda found: found[-1],
    "weightedmean_tokens": lambda found: (
        sum((at + 1) * row for at, row in enumerate(found)) / sum(range(len(found) + 1))
    ),
}


@pytest.fixture
def copy(embedder_folder: Folder, tmp_path: Path) -> Callable[[str], Path]:
    """A modifiable copy of a folder."""
    return lambda kind: Path(shutil.copytree(embedder_folder(kind), tmp_path / kind))


@pytest.mark.parametrize("mode", POOLS)
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_pooling_mode_follows_the_layout_files(copy: Callable[[str], Path], kind: str, mode: str) -> None:
    """Texts of all lengths in one batch."""
    folder = copy(kind)
    lay_out(folder, {f"pooling_mode_{mode}": True})
    loaded = load(folder)
    inputs = [loaded.tokenizer.encode(text) for text in TEXTS]
    vectors = loaded.embedder.vectors(inputs)

    for each, vector in zip(inputs, vectors, strict=True):
        assert torch.allclose(POOLS[mode](states(folder, each.tokens)), vector, **EXACT)


@pytest.mark.parametrize(
    ("kind", "alone"),
    [
        ("bert", "AutoModel"),
        ("roberta", "AutoModel"),
        ("modernbert", "AutoModel"),
        ("t5", "T5EncoderModel"),
        ("qwen3", "AutoModel"),
        ("llama", "AutoModel"),
    ],
)
def test_folder_without_layout_files_pools_the_mean(embedder_folder: Folder, kind: str, alone: str) -> None:
    """Of encoders, of the encoder of an encoder-decoder, and of decoders."""
    loaded, model = load(embedder_folder(kind)), getattr(transformers, alone)
    inputs = [loaded.tokenizer.encode(text) for text in TEXTS if len(text) < 30]
    vectors = loaded.embedder.vectors(inputs)

    assert (WIDTH, "vectors") == (loaded.info.dimensions, loaded.info.output_kind)
    for each, vector in zip(inputs, vectors, strict=True):
        assert torch.allclose(mean(states(embedder_folder(kind), each.tokens, model)), vector, **EXACT)


def test_causal_model_pools_its_last_token(copy: Callable[[str], Path]) -> None:
    """The default of sentence-transformers."""
    folder = copy("qwen3")
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder)
    model.save_pretrained(folder)
    loaded = load(folder)
    read = loaded.tokenizer.encode("a thing")

    assert torch.allclose(states(folder, read.tokens)[-1], loaded.embedder.vectors([read])[0], **EXACT)


def test_dense_and_normalize_steps_are_applied_in_order(copy: Callable[[str], Path]) -> None:
    """Two concatenated pooling modes, a layer with an activation, one with a residual, normalisation."""
    folder = copy("bert")
    lay_out(folder, {"pooling_mode": ["cls", "mean"]}, "Dense", "Dense", "Normalize")
    torch.manual_seed(1)
    first, bias, second, around = (torch.randn(*size) for size in ((16, 2 * WIDTH), (16,), (4, 16), (4, 16)))
    write(folder / "2_Dense" / "config.json", {"activation_function": "torch.nn.modules.activation.GELU"})
    save_file({"linear.weight": first, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    identity = {"activation_function": "torch.nn.modules.linear.Identity", "use_residual": True, "bias": False}
    write(folder / "3_Dense" / "config.json", identity)
    save_file({"linear.weight": second, "residual.weight": around}, folder / "3_Dense" / "model.safetensors")
    loaded = load(folder)
    read = loaded.tokenizer.encode(TEXTS[1])
    found = states(folder, read.tokens)
    inner = gelu(linear(torch.cat([found[0], found.mean(0)]), first, bias))

    expected = normalize(linear(inner, second) + linear(inner, around), dim=0)
    assert torch.allclose(expected, loaded.embedder.vectors([read])[0], **EXACT)
    assert 4 == loaded.info.dimensions


@pytest.mark.parametrize(("included", "start"), [(True, 0), (False, 1 + len(QUERY))])
def test_prompt_tokens_may_be_excluded_from_pooling(copy: Callable[[str], Path], included: bool, start: int) -> None:
    """The prompt is computed in both cases."""
    folder = copy("bert")
    lay_out(folder, {"pooling_mode": "mean", "include_prompt": included}, prompts={"query": QUERY})
    loaded = load(folder)
    read = loaded.tokenizer.encode("why?", prompt=loaded.tokenizer.prompt("query"))

    assert 2 + len(QUERY) + len("why?") == len(read.tokens)
    assert torch.allclose(mean(states(folder, read.tokens)[start:]), loaded.embedder.vectors([read])[0], **EXACT)


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "t5", "qwen3"])
def test_vector_is_independent_of_its_batch(embedder_folder: Folder, kind: str) -> None:
    """A vector of length 1 is equal within 1e-6."""
    loaded, chance = load(embedder_folder(kind)), random.Random(kind)
    lengths = [chance.randint(1, loaded.tokenizer.max_length) for _ in range(24)]
    inputs = [EmbeddingInput(tuple(chance.randrange(3, 259) for _ in range(length))) for length in lengths]
    alone = torch.cat([loaded.embedder.vectors([each]) for each in inputs])
    for _ in range(4):
        mix = chance.sample(range(len(inputs)), chance.randint(2, len(inputs)))
        together = loaded.embedder.vectors([inputs[at] for at in mix])

        assert float((normalize(alone[mix], dim=-1) - normalize(together, dim=-1)).abs().max()) < NEIGHBOURS


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtype_setting_applies_to_the_embedding_model(embedder_folder: Folder, dtype: str) -> None:
    exact, other = load(embedder_folder("bert")), load(embedder_folder("bert"), dtype=dtype)
    inputs = [exact.tokenizer.encode(text) for text in TEXTS]
    vectors = [normalize(each.embedder.vectors(inputs), dim=-1) for each in (exact, other)]

    assert torch.allclose(*vectors, rtol=0, atol=0.05 if dtype == "bfloat16" else 1e-5)
    assert (dtype, LONGEST) == (other.info.model.dtype, other.embedder.max_length_difference)


@pytest.mark.parametrize("kind", ["ranker", "roberta-ranker"])
def test_reranker_scores_pairs(copy: Callable[[str], Path], kind: str) -> None:
    """The logit of both texts together, between 0 and 1 unless its files name another activation."""
    folder = copy(kind)
    loaded = load(folder)
    pairs = [("why?", "because"), ("a", "the end of it all")]
    inputs = [loaded.tokenizer.encode_pair(*pair) for pair in pairs]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for pair, score in zip(pairs, loaded.embedder.vectors(inputs), strict=True):
        read = transformers.AutoTokenizer.from_pretrained(folder)(*pair, return_tensors="pt")
        with torch.inference_mode():
            logit = model(**read).logits[0]

        assert torch.allclose(logit.sigmoid(), score, **EXACT)
    assert ("scores", 1) == (loaded.info.output_kind, loaded.info.dimensions)


@pytest.mark.parametrize("fields", [{"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}])
def test_reranker_activation_follows_its_configuration(copy: Callable[[str], Path], fields: dict[str, Any]) -> None:
    folder = copy("ranker")
    config = transformers.AutoConfig.from_pretrained(folder)
    config.update(fields)
    config.save_pretrained(folder)
    pair = ("a", "b")
    default, configured = load(save_embedder("ranker", folder.parent / "plain")), load(folder)
    scores = [each.embedder.vectors([each.tokenizer.encode_pair(*pair)])[0] for each in (default, configured)]

    assert torch.allclose(scores[0], scores[1].sigmoid(), **EXACT)


def test_max_length_follows_the_files_and_the_positions(copy: Callable[[str], Path]) -> None:
    folder = copy("bert")
    assert LONGEST == load(folder).tokenizer.max_length
    lay_out(folder, {"pooling_mode": "mean"})
    write(folder / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": True})
    short = load(folder).tokenizer
    assert 20 == short.max_length
    assert short.encode("abc") == short.encode("ABC")
    write(folder / "sentence_bert_config.json", {"max_seq_length": 2000})
    assert 64 == load(folder).tokenizer.max_length
    assert 40 - 1 == load(copy("roberta")).tokenizer.max_length


def spoil_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def spoil_dense(folder: Path) -> None:
    lay_out(folder, {}, "Dense")
    write(folder / "2_Dense" / "config.json", {"activation_function": "torch.nn.modules.activation.Tanh"})
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"a pickle")


def drop_weights(folder: Path) -> None:
    model = transformers.BertModel.from_pretrained(folder)
    weights = {name: one for name, one in model.state_dict().items() if "layer.1.output" not in name}
    model.save_pretrained(folder, state_dict=weights)


def foreign_module(folder: Path) -> None:
    write(folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": "custom_st.Transformer"}])


def outside(folder: Path) -> None:
    lay_out(folder, {})
    modules = [{"idx": 0, "name": "0", "path": "../../etc", "type": "sentence_transformers.models.Transformer"}]
    write(folder / "modules.json", modules)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_weights, "no safetensors weights"),
        (spoil_dense, "2_Dense has no safetensors weights"),
        (drop_weights, "its files lack weights"),
        (foreign_module, "custom_st.Transformer is code of its own"),
        (outside, "outside its folder"),
        (lambda folder: lay_out(folder, {}, "LSTM"), "its module LSTM is not supported"),
        (lambda folder: lay_out(folder, {"pooling_mode": "attention"}), "its pooling 'attention' is not supported"),
        (lambda folder: lay_out(folder, {}, similarity_fn_name="own"), "its similarity 'own' is not supported"),
        (lambda folder: lay_out(folder, {}, default_prompt_name="poem"), "its default prompt 'poem' has no text"),
        (lambda folder: (folder / "modules.json").write_text("[{"), "as an embedding model: "),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot serve the model"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "nothing"}'), "cannot serve the model"),
    ],
)
def test_unsupported_layout_is_refused(
    copy: Callable[[str], Path], spoil: Callable[[Path], object], words: str
) -> None:
    folder = copy("bert")
    spoil(folder)
    with pytest.raises(ModelUnsupported) as refusal:
        load(folder)

    assert words in str(refusal.value)
    assert 1 == len(str(refusal.value).splitlines())


def test_missing_or_too_large_embedding_model_is_named(
    embedder_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelMissing, match="/no/such"):
        load(Path("/no/such"))
    with pytest.raises(ModelUnsupported, match="3 labels"):
        load(embedder_folder("classifier"))
    monkeypatch.setattr("engine.embedder.loading.available_bytes", lambda _: 2**10)
    with pytest.raises(EmbedderTooLarge, match=r"the embedding model '.*bert' needs"):
        load(embedder_folder("bert"))


def test_model_that_mixes_padding_gets_batches_of_one_length(copy: Callable[[str], Path]) -> None:
    """FNet mixes all positions of a row; the load detects it."""
    folder = copy("bert")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    torch.manual_seed(3)
    config = transformers.FNetConfig(vocab_size=272, type_vocab_size=2, initializer_range=0.5, **sizes)
    transformers.FNetModel(config).save_pretrained(folder)

    assert 0 == load(folder).embedder.max_length_difference
    assert 39 == load(copy("roberta")).embedder.max_length_difference
