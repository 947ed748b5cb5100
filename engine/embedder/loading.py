"""From a name to an embedding model that is known to give right vectors here: only safetensors, no code of a folder.

It computes in float32 unless another format is asked for: in bfloat16 what stands beside a text in a batch would show
in the third digit of its vector.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoTokenizer,
)
from transformers.utils.logging import disable_progress_bar

from engine.config import EngineConfig
from engine.embedder.embedder import Embedder
from engine.embedder.head import EmbeddingHead, ScoreHead, VectorHead
from engine.embedder.layout import Layout, read_layout
from engine.embedder.tokenizer import EmbeddingTokenizer
from engine.errors import EmbedderTooLarge, ModelUnsupported
from engine.load.checkpoint import (
    READ_ERRORS,
    default_threads,
    error_line,
    fingerprint,
    missing_weights_reason,
    resolve,
    weight_files,
)
from engine.load.memory import available_bytes
from engine.model.rope import original_length
from engine.quantize.quantize import bytes_of
from engine.types.request import EmbeddingInput
from engine.types.status import EmbeddingModelInfo, ModelInfo

# As for the model, whose context is no longer either unless somebody asks for it.
_MAX_LENGTH = 8192
# Texts of other lengths, whose vectors must not depend on whether they are computed together.
_SAMPLE_LENGTHS, _MAX_CHECKED_LENGTH = (3, 11), 512
# Rows of a batch hold their activations of one layer at a time, about 16 widths with the MLP's.
_ACTIVATION_WIDTHS = 16


@dataclass(frozen=True, slots=True)
class LoadedEmbedder:
    """An embedding model: who computes, who reads texts, and what there is to know of it."""

    embedder: Embedder
    tokenizer: EmbeddingTokenizer
    info: EmbeddingModelInfo


def load_embedder(config: EngineConfig, on_phase: Callable[[str], None]) -> LoadedEmbedder | None:
    """The embedding model that the settings name; None: they name none. Raises ModelError kinds."""
    name = config.embedding_model
    if name is None:
        return None
    if not sys.stderr.isatty():
        disable_progress_bar()
    on_phase("embedding model")
    folder = resolve(name)
    try:
        return _load(name, folder, config)
    except READ_ERRORS as error:
        raise ModelUnsupported(name, error_line(error)) from error


def _load(name: str, folder: Path, config: EngineConfig) -> LoadedEmbedder:
    available = available_bytes()
    layout = read_layout(name, folder)
    model, head, tokenizer = _read(name, layout, config)
    threads = config.threads or default_threads(layout.folder)
    original = original_length(model)
    embedder = Embedder(model, head, pad=_pad_token(tokenizer), threads=threads, spread=0, original=original)
    vocabulary = model.get_input_embeddings().num_embeddings
    reader = EmbeddingTokenizer(tokenizer, layout, vocabulary=vocabulary, longest=_max_length(model, tokenizer, layout))
    dimensions = _check(name, embedder, reader)
    work = max(reader.max_length, config.chunk) * _ACTIVATION_WIDTHS * model.config.get_text_config().hidden_size * 4
    info = EmbeddingModelInfo(
        model=_info(name, folder, model, reader),
        output_kind="scores" if isinstance(head, ScoreHead) else "vectors",
        dimensions=dimensions,
        prompts=tuple(prompt for prompt, _ in layout.prompts),
        similarity=layout.similarity,
        weights_bytes=bytes_of(model),
        workspace_bytes=work,
    )
    if info.weights_bytes + work > available:
        raise EmbedderTooLarge(name, info.weights_bytes + work, available)
    return LoadedEmbedder(embedder, reader, info)


def _read(name: str, layout: Layout, settings: EngineConfig) -> tuple[Any, EmbeddingHead, Any]:
    """The model, what comes behind it, and its tokenizer."""
    folder = layout.folder
    if not weight_files(folder):
        raise ModelUnsupported(name, missing_weights_reason(folder))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = _model_class(config, layout)
    config.use_cache = False
    model, report = kind.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32 if settings.dtype == "auto" else getattr(torch, settings.dtype),
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    ranks = kind is AutoModelForSequenceClassification
    head = ScoreHead(config) if ranks else VectorHead(layout, _pooling(config, layout))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # Checkpoints need not have the layer behind BERT's first state: nobody reads it.
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    missing += sorted(str(key) for key in report["mismatched_keys"])
    if missing:
        raise ModelUnsupported(name, f"its files lack weights, {len(missing)} in all, such as {missing[0]}")
    return model.to(settings.device).eval().requires_grad_(False), head, tokenizer


def _model_class(config: Any, layout: Layout) -> Any:
    """transformers' choice of a class: a ranker, an encoder without its decoder, or the model without any head."""
    if not layout.pooled and _has_architecture(config, "ForSequenceClassification"):
        if config.num_labels != 1:
            raise ValueError(f"it sorts texts into {config.num_labels} classes; a model that ranks gives one score")
        return AutoModelForSequenceClassification
    halved = config.is_encoder_decoder or _has_architecture(config, "EncoderModel")
    return AutoModelForTextEncoding if halved and type(config) in AutoModelForTextEncoding._model_mapping else AutoModel


def _pooling(config: Any, layout: Layout) -> tuple[Any, ...]:
    """As sentence-transformers does it where the files do not say."""
    one_way = _has_architecture(config, "ForCausalLM") and getattr(config, "is_causal", True)
    return layout.pooled or (("lasttoken",) if one_way else ("mean",))


def _has_architecture(config: Any, ending: str) -> bool:
    return any(architecture.endswith(ending) for architecture in config.architectures or ())


def _pad_token(tokenizer: Any) -> int:
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def _max_length(model: Any, tokenizer: Any, layout: Layout) -> int:
    """Tokens of a text: what the files say, as far as the model has positions."""
    said = min(tokenizer.model_max_length, _MAX_LENGTH) if layout.longest is None else layout.longest
    return int(min(said, _position_count(model), _MAX_LENGTH))


def _position_count(model: Any) -> int:
    """Positions that a model can tell apart; those of RoBERTa begin behind that of what fills a batch up."""
    table = next((part for name, part in model.named_modules() if name.endswith("position_embeddings")), None)
    if isinstance(table, nn.Embedding):
        return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return known if isinstance(known, int) and known > 0 else _MAX_LENGTH


def _check(name: str, embedder: Embedder, reader: EmbeddingTokenizer) -> int:
    """Try it: how long the vectors are, and whether texts of several lengths can be computed together.

    A text of full length is tried too, if that is quick: there may be fewer positions than the files say.
    """
    longest = reader.max_length if reader.max_length <= _MAX_CHECKED_LENGTH else 1
    tokens = [token for token in range(reader.vocabulary) if token != embedder.pad_token]
    inputs = [
        EmbeddingInput(tuple(itertools.islice(itertools.cycle(tokens), min(length, reader.max_length))))
        for length in (*_SAMPLE_LENGTHS, longest)
    ]
    try:
        alone, together = torch.cat([embedder.vectors([each]) for each in inputs]), embedder.vectors(inputs)
    except Exception as error:
        raise ModelUnsupported(name, f"it cannot run ({error_line(error)})") from error
    if not alone.isfinite().all():
        raise ModelUnsupported(name, "its vectors have numbers that are not finite")
    if _agree(alone, together, embedder.dtype):
        embedder.max_length_difference = reader.max_length
    return alone.shape[-1]


def _agree(alone: Tensor, together: Tensor, dtype: torch.dtype) -> bool:
    """Whether vectors are the same but for rounding: measured at length 1, which a score has not.

    Half of the digits of a number must agree. Measured are 1e-7 in float32 and 1e-3 in bfloat16.
    """
    if alone.shape[-1] > 1:
        alone, together = normalize(alone, dim=-1), normalize(together, dim=-1)
    return bool((alone - together).abs().max() < math.sqrt(torch.finfo(dtype).eps))


def _info(name: str, folder: Path, model: Any, reader: EmbeddingTokenizer) -> ModelInfo:
    return ModelInfo(
        name=name,
        folder=str(folder),
        fingerprint=fingerprint(folder),
        architecture=type(model).__name__,
        parameters=sum(one.numel() for one in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        vocabulary=reader.vocabulary,
        context=reader.max_length,
        slots=0,
        device=model.device.type,
    )
