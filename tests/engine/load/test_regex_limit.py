"""A tokenizer whose regular expression backtracks: refused at load, and an error of the request where it passed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Regex, decoders

from engine.config import EngineConfig
from engine.embedder.loading import load_embedder
from engine.errors import InvalidRequest, ModelUnsupported
from engine.load.read.checkpoint import read_checkpoint
from engine.load.read.tokenizer_files import read_model_tokenizer, read_tokenizer
from engine.text.detokenizer import TokenBytes
from engine.text.regex_limit import REASON
from engine.text.vocabulary import summarize
from tests.engine.embedder.folders import lay_out, save_embedder
from tests.engine.kit.models import save_model
from tests.engine.kit.tokenizers import split_before

REPEATED, PAIRS = "(a+)+$", "((ab)+)+$"


def test_a_model_is_refused(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    split_before(folder, REPEATED)

    with pytest.raises(ModelUnsupported, match=REASON):
        read_model_tokenizer("model", read_checkpoint(folder), vocabulary=10**6)


def test_an_embedding_model_is_refused(tmp_path: Path) -> None:
    folder = save_embedder("bert", tmp_path / "bert")
    lay_out(folder, {"pooling_mode_mean_tokens": True})
    split_before(folder, REPEATED)

    with pytest.raises(ModelUnsupported, match=REASON):
        load_embedder(EngineConfig(embedding_model=str(folder), threads=1), lambda phase: None)


def test_a_text_that_cannot_be_split_is_an_invalid_request(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    split_before(folder, PAIRS)
    tokenizer = read_model_tokenizer("model", read_checkpoint(folder), vocabulary=10**6).with_context(512, 512)

    with pytest.raises(InvalidRequest, match=REASON):
        tokenizer.encode("ab" * 40 + "!")
    assert tokenizer.encode("ab")


def test_tokens_that_cannot_be_decoded_are_an_invalid_request(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(save_model("llama", tmp_path / "model"))
    backend = tokenizer.backend_tokenizer
    text = "ab" * 40 + "!"
    tokens = backend.encode(text, add_special_tokens=False).ids
    steps = [backend.decoder, decoders.Fuse(), decoders.Replace(Regex(PAIRS), "")]
    backend.decoder = decoders.Sequence([step for step in steps if step is not None])
    token_bytes = TokenBytes(tokenizer, summarize(tokenizer.get_vocab()))

    with pytest.raises(InvalidRequest, match=REASON):
        token_bytes.decode(tokens)
