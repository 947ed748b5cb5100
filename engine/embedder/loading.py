"""Loads and checks the embedding model: only safetensors, no code of a folder.

It computes in float32 unless another dtype is set: in bfloat16 the other texts of a batch change the third digit of a
vector.
"""

from __future__ import annotations

import itertools
import math
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

from engine.config import EngineConfig
from engine.embedder.embedder import Embedder
from engine.embedder.head import EmbeddingHead, ScoreHead, VectorHead
from engine.embedder.layout import Layout, read_layout
from engine.embedder.tokenizer import EmbeddingTokenizer
from engine.errors import EmbedderTooLarge, InvalidRequest, ModelUnsupported
from engine.load.machine.available_memory import available_bytes
from engine.load.read.checkpoint import (
    READ_ERRORS,
    default_threads,
    error_line,
    fingerprint,
    is_gguf,
    missing_weights_reason,
    resolve,
    weight_files,
)
from engine.load.read.weight_bars import reported_weights
from engine.model.rope import original_length
from engine.quantize.quantize import bytes_of
from engine.text.regex_limit import check_repetitions
from engine.types.request import EmbeddingInput
from engine.types.status import EmbeddingModelInfo, ModelInfo

# Tokens of a text at most, if the files allow more.
_MAX_LENGTH = 8192
# Lengths in tokens of the texts that check whether a batch changes vectors.
_SAMPLE_LENGTHS = (3, 11)
# Longest text, in tokens, of the check.
_MAX_CHECKED_LENGTH = 512
# Widths of activations that a token of a batch holds, with the MLP's.
_ACTIVATION_WIDTHS = 16


@dataclass(frozen=True, slots=True)
class LoadedEmbedder:
    """An embedding model with its tokenizer and its public description."""

    embedder: Embedder
    tokenizer: EmbeddingTokenizer
    info: EmbeddingModelInfo


def load_embedder(config: EngineConfig, on_phase: Callable[[str], None]) -> LoadedEmbedder | None:
    """The embedding model of the configuration; None: it names none. Raises subclasses of ModelError."""
    name = config.embedding_model
    if name is None:
        return None
    on_phase("embedding model")
    folder = resolve(name)
    if is_gguf(folder):
        raise ModelUnsupported(name, "embedding models in GGUF files are not supported; pass a folder with safetensors")
    try:
        with reported_weights():
            return _load(name, folder, config)
    except InvalidRequest as error:
        raise ModelUnsupported(name, error.reason) from error
    except READ_ERRORS as error:
        raise ModelUnsupported(name, error_line(error)) from error


def _load(name: str, folder: Path, config: EngineConfig) -> LoadedEmbedder:
    available = available_bytes(config)
    layout = read_layout(name, folder)
    model, head, hf_tokenizer = _read(name, layout, config)
    threads = config.threads or default_threads(layout.folder)
    original = original_length(model)
    embedder = Embedder(
        model,
        head,
        pad_token=_pad_token(hf_tokenizer),
        threads=threads,
        max_length_difference=0,
        original_length=original,
    )
    vocabulary = model.get_input_embeddings().num_embeddings
    max_length = _max_length(model, hf_tokenizer, layout)
    tokenizer = EmbeddingTokenizer(hf_tokenizer, layout, vocabulary=vocabulary, max_length=max_length)
    dimensions = _check(name, embedder, tokenizer)
    token_bytes = _ACTIVATION_WIDTHS * model.config.get_text_config().hidden_size * 4
    workspace_bytes = max(max_length, config.chunk) * token_bytes
    info = EmbeddingModelInfo(
        model=_info(name, folder, model, tokenizer),
        output_kind="scores" if isinstance(head, ScoreHead) else "vectors",
        dimensions=dimensions,
        prompts=tuple(prompt for prompt, _ in layout.prompts),
        similarity=layout.similarity,
        weights_bytes=bytes_of(model),
        workspace_bytes=workspace_bytes,
    )
    if info.weights_bytes + workspace_bytes > available:
        raise EmbedderTooLarge(name, info.weights_bytes + workspace_bytes, available)
    return LoadedEmbedder(embedder, tokenizer, info)


def _read(name: str, layout: Layout, settings: EngineConfig) -> tuple[Any, EmbeddingHead, Any]:
    """The model, its head and its tokenizer."""
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
    reranks = kind is AutoModelForSequenceClassification
    head = ScoreHead(config) if reranks else VectorHead(layout, _pooling(config, layout))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    check_repetitions(tokenizer)
    # Checkpoints may lack BERT's pooler, which is not used.
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    missing += sorted(str(key) for key in report["mismatched_keys"])
    if missing:
        raise ModelUnsupported(name, f"its files lack weights, {len(missing)} in all, such as {missing[0]}")
    return model.to(settings.device).eval().requires_grad_(False), head, tokenizer


def _model_class(config: Any, layout: Layout) -> Any:
    """The Auto class of transformers: a reranker, an encoder without its decoder, or a model without head."""
    if not layout.pooling and _has_architecture(config, "ForSequenceClassification"):
        if config.num_labels != 1:
            raise ValueError(f"it classifies texts by {config.num_labels} labels; a reranker has one score")
        return AutoModelForSequenceClassification
    encoder_only = config.is_encoder_decoder or _has_architecture(config, "EncoderModel")
    return (
        AutoModelForTextEncoding
        if encoder_only and type(config) in AutoModelForTextEncoding._model_mapping
        else AutoModel
    )


def _pooling(config: Any, layout: Layout) -> tuple[Any, ...]:
    """The pooling modes, with the default of sentence-transformers."""
    causal = _has_architecture(config, "ForCausalLM") and getattr(config, "is_causal", True)
    return layout.pooling or (("lasttoken",) if causal else ("mean",))


def _has_architecture(config: Any, ending: str) -> bool:
    return any(architecture.endswith(ending) for architecture in config.architectures or ())


def _pad_token(tokenizer: Any) -> int:
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def _max_length(model: Any, tokenizer: Any, layout: Layout) -> int:
    """Tokens of a text: the limit of the files, within the positions of the model."""
    limit = min(tokenizer.model_max_length, _MAX_LENGTH) if layout.max_length is None else layout.max_length
    return int(min(limit, _position_count(model), _MAX_LENGTH))


def _position_count(model: Any) -> int:
    """Positions of a model; RoBERTa's start after the padding index."""
    embedding = next((part for name, part in model.named_modules() if name.endswith("position_embeddings")), None)
    if isinstance(embedding, nn.Embedding):
        return embedding.num_embeddings - (0 if embedding.padding_idx is None else embedding.padding_idx + 1)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else _MAX_LENGTH


def _check(name: str, embedder: Embedder, tokenizer: EmbeddingTokenizer) -> int:
    """Check the model: the dimensions of its vectors, and whether texts of different lengths can share a batch.

    A text of full length is checked if it is short enough: the model may have fewer positions than its files claim.
    """
    longest = tokenizer.max_length if tokenizer.max_length <= _MAX_CHECKED_LENGTH else 1
    tokens = [token for token in range(tokenizer.vocabulary) if token != embedder.pad_token]
    inputs = [
        EmbeddingInput(tuple(itertools.islice(itertools.cycle(tokens), min(length, tokenizer.max_length))))
        for length in (*_SAMPLE_LENGTHS, longest)
    ]
    try:
        alone, together = torch.cat([embedder.vectors([text]) for text in inputs]), embedder.vectors(inputs)
    except Exception as error:
        raise ModelUnsupported(name, f"it cannot run ({error_line(error)})") from error
    if not alone.isfinite().all():
        raise ModelUnsupported(name, "its vectors have numbers that are not finite")
    if _agree(alone, together, embedder.dtype):
        embedder.max_length_difference = tokenizer.max_length
    return alone.shape[-1]


def _agree(alone: Tensor, together: Tensor, dtype: torch.dtype) -> bool:
    """Whether vectors differ by rounding only, normalised to length 1 (scores are compared directly).

    The tolerance is half the digits of the dtype. Measured differences: 1e-7 in float32, 1e-3 in bfloat16.
    """
    if alone.shape[-1] > 1:
        alone, together = normalize(alone, dim=-1), normalize(together, dim=-1)
    return bool((alone - together).abs().max() < math.sqrt(torch.finfo(dtype).eps))


def _info(name: str, folder: Path, model: Any, tokenizer: EmbeddingTokenizer) -> ModelInfo:
    return ModelInfo(
        name=name,
        folder=str(folder),
        fingerprint=fingerprint(folder),
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        vocabulary=tokenizer.vocabulary,
        context=tokenizer.max_length,
        slots=0,
        device=model.device.type,
    )
