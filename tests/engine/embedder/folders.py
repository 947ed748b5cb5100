"""Tiny random embedding models in the layout of their authors, and their hidden states by transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoModel, PreTrainedTokenizerFast

from engine.config import EngineConfig
from engine.embedder.loading import LoadedEmbedder, load_embedder

LONGEST = 48
WIDTH = 32
SPECIALS = ["[PAD]", "[CLS]", "[SEP]"]
TEXTS = ["a", "the cat sat on the mat", "in the end, a thing", "q: why?", "x" * 40]
QUERY = "query: "

_SIZES: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
_CAUSAL = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
_RANKER = {"num_labels": 1}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", _SIZES),
    # Positions start behind the padding index, as in all models of its family.
    "roberta": ("RobertaModel", "RobertaConfig", {**_SIZES, "max_position_embeddings": 40, "type_vocab_size": 1}),
    "modernbert": ("ModernBertModel", "ModernBertConfig", {**_SIZES, "local_attention": 8}),
    "t5": (
        "T5EncoderModel",
        "T5Config",
        {"vocab_size": 272, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    ),
    "qwen3": ("Qwen3Model", "Qwen3Config", _CAUSAL),
    "llama": ("LlamaModel", "LlamaConfig", _CAUSAL),
    "ranker": ("BertForSequenceClassification", "BertConfig", {**_SIZES, **_RANKER}),
    "roberta-ranker": ("RobertaForSequenceClassification", "RobertaConfig", {**_SIZES, **_RANKER}),
    "classifier": ("BertForSequenceClassification", "BertConfig", {**_SIZES, "num_labels": 3}),
}


def save_embedder(kind: str, folder: Path) -> Path:
    """Write a tiny model of a kind, the same at every call, with a tokenizer and no layout files."""
    model, config, settings = KINDS[kind]
    torch.manual_seed(sum(kind.encode()))
    getattr(transformers, model)(getattr(transformers, config)(**settings)).save_pretrained(folder)
    save_tokenizer(folder, ["input_ids", "attention_mask", *(["token_type_ids"] if config == "BertConfig" else [])])
    return folder


def save_tokenizer(folder: Path, inputs: list[str]) -> None:
    """Write a tokenizer with a token for each byte and special tokens of encoders; `inputs` are its model inputs."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=LONGEST,
        model_input_names=inputs,
    )
    wrapped.save_pretrained(folder)


def write(file: Path, content: object) -> None:
    """Write a JSON file, and create its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def lay_out(folder: Path, pooling: dict[str, Any], *more: str, **library: Any) -> None:
    """Write the list of modules (the transformer, its pooling and `more`) and the settings of the library."""
    kinds = ["Transformer", "Pooling", *more]
    paths = ["", *(f"{at}_{kind}" for at, kind in enumerate(kinds) if at)]
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write(folder / "modules.json", modules)
    write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": WIDTH, **pooling})
    write(folder / "config_sentence_transformers.json", library)


def load(folder: Path, **settings: Any) -> LoadedEmbedder:
    """The embedding model of a folder, loaded by the engine's loader."""
    loaded = load_embedder(EngineConfig(embedding_model=str(folder), threads=1, **settings), lambda phase: None)
    assert loaded is not None
    return loaded


def states(folder: Path, tokens: Sequence[int], kind: type = AutoModel) -> Tensor:
    """The hidden states of the last layer [tokens, width] for one text, by transformers."""
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found: Tensor = model(input_ids=torch.tensor([list(tokens)])).last_hidden_state[0]
    return found
