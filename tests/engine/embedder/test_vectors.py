"""Vectors are those that transformers alone makes of the same files, whatever else is in a batch."""

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
# What transformers computes in float32 for one text alone.
EXACT: dict[str, float] = {"rtol": 0, "atol": 1e-5}
# What the neighbours in a batch may change of a vector of length 1.
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
    """A folder of one's own."""
    return lambda kind: Path(shutil.copytree(embedder_folder(kind), tmp_path / kind))


@pytest.mark.parametrize("way", POOLS)
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_each_way_of_pooling_is_that_of_the_files(copy: Callable[[str], Path], kind: str, way: str) -> None:
    """Texts of all lengths in one batch."""
    folder = copy(kind)
    lay_out(folder, {f"pooling_mode_{way}": True})
    loaded = load(folder)
    inputs = [loaded.tokenizer.encode(text) for text in TEXTS]
    vectors = loaded.embedder.vectors(inputs)

    for each, vector in zip(inputs, vectors, strict=True):
        assert torch.allclose(POOLS[way](states(folder, each.tokens)), vector, **EXACT)


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
def test_a_folder_without_further_files_pools_the_mean(embedder_folder: Folder, kind: str, alone: str) -> None:
    """Of encoders, of the encoder of a pair, and of decoders."""
    loaded, model = load(embedder_folder(kind)), getattr(transformers, alone)
    inputs = [loaded.tokenizer.encode(text) for text in TEXTS if len(text) < 30]
    vectors = loaded.embedder.vectors(inputs)

    assert (WIDTH, "vectors") == (loaded.info.dimensions, loaded.info.output_kind)
    for each, vector in zip(inputs, vectors, strict=True):
        assert torch.allclose(mean(states(embedder_folder(kind), each.tokens, model)), vector, **EXACT)


def test_a_model_made_to_go_on_pools_its_last_token(copy: Callable[[str], Path]) -> None:
    """As sentence-transformers has it where no file says anything."""
    folder = copy("qwen3")
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder)
    model.save_pretrained(folder)
    loaded = load(folder)
    read = loaded.tokenizer.encode("a thing")

    assert torch.allclose(states(folder, read.tokens)[-1], loaded.embedder.vectors([read])[0], **EXACT)


def test_dense_layers_and_length_come_in_their_order(copy: Callable[[str], Path]) -> None:
    """Two ways of pooling one behind the other, a layer with an activation, one with a way around it, length 1."""
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
def test_a_prompt_may_be_left_out_of_the_mean(copy: Callable[[str], Path], included: bool, start: int) -> None:
    """It is read in any case, with the special token in front of it."""
    folder = copy("bert")
    lay_out(folder, {"pooling_mode": "mean", "include_prompt": included}, prompts={"query": QUERY})
    loaded = load(folder)
    read = loaded.tokenizer.encode("why?", prompt=loaded.tokenizer.prompt("query"))

    assert 2 + len(QUERY) + len("why?") == len(read.tokens)
    assert torch.allclose(mean(states(folder, read.tokens)[start:]), loaded.embedder.vectors([read])[0], **EXACT)


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "t5", "qwen3"])
def test_neighbours_change_nothing_that_float32_shows(embedder_folder: Folder, kind: str) -> None:
    """Alone or in any batch, a vector of length 1 is the same within 1e-6."""
    loaded, chance = load(embedder_folder(kind)), random.Random(kind)
    lengths = [chance.randint(1, loaded.tokenizer.max_length) for _ in range(24)]
    inputs = [EmbeddingInput(tuple(chance.randrange(3, 259) for _ in range(length))) for length in lengths]
    alone = torch.cat([loaded.embedder.vectors([each]) for each in inputs])
    for _ in range(4):
        mix = chance.sample(range(len(inputs)), chance.randint(2, len(inputs)))
        together = loaded.embedder.vectors([inputs[at] for at in mix])

        assert float((normalize(alone[mix], dim=-1) - normalize(together, dim=-1)).abs().max()) < NEIGHBOURS


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_another_number_format_is_that_of_the_model(embedder_folder: Folder, dtype: str) -> None:
    """Whoever asks for one gets it: coarser vectors, in batches as before, or finer ones."""
    exact, other = load(embedder_folder("bert")), load(embedder_folder("bert"), dtype=dtype)
    inputs = [exact.tokenizer.encode(text) for text in TEXTS]
    vectors = [normalize(each.embedder.vectors(inputs), dim=-1) for each in (exact, other)]

    assert torch.allclose(*vectors, rtol=0, atol=0.05 if dtype == "bfloat16" else 1e-5)
    assert (dtype, LONGEST) == (other.info.model.dtype, other.embedder.max_length_difference)


@pytest.mark.parametrize("kind", ["ranker", "roberta-ranker"])
def test_a_ranker_scores_pairs(copy: Callable[[str], Path], kind: str) -> None:
    """The logit of both texts together, between 0 and 1 unless its files say otherwise."""
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
def test_a_ranker_may_score_beyond_one(copy: Callable[[str], Path], fields: dict[str, Any]) -> None:
    """Where its settings name another activation."""
    folder = copy("ranker")
    config = transformers.AutoConfig.from_pretrained(folder)
    config.update(fields)
    config.save_pretrained(folder)
    pair = ("a", "b")
    plain, told = load(save_embedder("ranker", folder.parent / "plain")), load(folder)
    scores = [each.embedder.vectors([each.tokenizer.encode_pair(*pair)])[0] for each in (plain, told)]

    assert torch.allclose(scores[0], scores[1].sigmoid(), **EXACT)


def test_texts_are_as_long_as_the_files_and_the_positions_say(copy: Callable[[str], Path]) -> None:
    """The tokenizer's length, that of the modules before it, and no more than there are positions."""
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
    kept = {name: one for name, one in model.state_dict().items() if "layer.1.output" not in name}
    model.save_pretrained(folder, state_dict=kept)


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
        (lambda folder: lay_out(folder, {}, "LSTM"), "its module LSTM is not known here"),
        (lambda folder: lay_out(folder, {"pooling_mode": "attention"}), "its pooling 'attention' is not known here"),
        (lambda folder: lay_out(folder, {}, similarity_fn_name="own"), "its similarity 'own' is not known here"),
        (lambda folder: lay_out(folder, {}, default_prompt_name="poem"), "its default prompt 'poem' has no text"),
        (lambda folder: (folder / "modules.json").write_text("[{"), "as an embedding model: "),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot serve the model"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "nothing"}'), "cannot serve the model"),
    ],
)
def test_what_would_give_other_vectors_is_refused(
    copy: Callable[[str], Path], spoil: Callable[[Path], object], words: str
) -> None:
    """In one line that says why; no pickle and no code of a folder is ever read."""
    folder = copy("bert")
    spoil(folder)
    with pytest.raises(ModelUnsupported) as refusal:
        load(folder)

    assert words in str(refusal.value)
    assert 1 == len(str(refusal.value).splitlines())


def test_what_cannot_be_found_or_does_not_fit_is_told(embedder_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name of the model that was asked for."""
    with pytest.raises(ModelMissing, match="/no/such"):
        load(Path("/no/such"))
    with pytest.raises(ModelUnsupported, match="3 classes"):
        load(embedder_folder("classifier"))
    monkeypatch.setattr("engine.embedder.loading.available_bytes", lambda: 2**10)
    with pytest.raises(EmbedderTooLarge, match=r"the embedding model '.*bert' needs"):
        load(embedder_folder("bert"))


def test_a_model_that_cannot_be_filled_up_takes_texts_of_one_length(copy: Callable[[str], Path]) -> None:
    """FNet mixes all places of a row, whatever is said to be no text: it is noticed when the model is loaded."""
    folder = copy("bert")
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    torch.manual_seed(3)
    config = transformers.FNetConfig(vocab_size=272, type_vocab_size=2, initializer_range=0.5, **sizes)
    transformers.FNetModel(config).save_pretrained(folder)

    assert 0 == load(folder).embedder.max_length_difference
    assert 39 == load(copy("roberta")).embedder.max_length_difference
