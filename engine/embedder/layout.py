"""Reads the layout files of an embedding model in the format of sentence-transformers.

The library itself would add scikit-learn and scipy, read pickles, tokenise on the computing thread, and accept no
tokens. An unknown module is refused. Fields and defaults follow sentence-transformers 6.2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from engine.errors import ModelUnsupported
from engine.types.status import Similarity

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

# Older files have one flag for each pooling mode; several modes are concatenated in this order.
_POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_LIBRARY = "sentence_transformers"


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer after the pooled vector: the folder of its weights, its activation by the name in torch.nn."""

    folder: Path
    activation: str = "Tanh"
    residual: bool = False


VectorStep = Dense | Literal["normalize"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a folder computes vectors.

    folder          of the transformer and its tokenizer
    pooling         pooling modes, concatenated; empty: not given by the files
    pools_prompt    whether tokens of a prompt are pooled too
    steps           applied to the pooled vector, in order
    max_length      tokens of a text with special tokens; None: not given by the files
    lowercase       whether texts are converted to lower case
    prompts         prefixes of a text, by the name of their purpose
    default_prompt  the purpose of a text without one
    """

    folder: Path
    pooling: tuple[Pooling, ...] = ()
    pools_prompt: bool = True
    steps: tuple[VectorStep, ...] = ()
    max_length: int | None = None
    lowercase: bool = False
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    similarity: Similarity = "cosine"


def read_layout(name: str, folder: Path) -> Layout:
    """The layout of the model `name` in a folder. Raises ModelUnsupported for files that this engine cannot follow."""
    try:
        modules = list(_modules(folder))
        fields: dict[str, Any] = {"folder": folder, **_of_library(_read(folder / "config_sentence_transformers.json"))}
        steps: list[VectorStep] = []
        for kind, subfolder in modules:
            match kind:
                case "Transformer":
                    fields |= {"folder": subfolder, **_of_transformer(subfolder)}
                case "Pooling":
                    fields |= _of_pooling(_read(subfolder / "config.json"))
                case "Dense":
                    steps.append(_dense(subfolder))
                case "Normalize":
                    steps.append("normalize")
                case "Dropout":
                    pass  # it does nothing outside training
                case _:
                    raise ValueError(f"its module {kind} is not supported")
    except (ValueError, TypeError, AttributeError, KeyError, OSError) as error:
        raise ModelUnsupported(name, f"as an embedding model: {error}") from error
    return Layout(**fields, steps=tuple(steps))


def _modules(folder: Path) -> Iterator[tuple[str, Path]]:
    """The types of the model's modules and their folders, in order; without a module list, one transformer."""
    file = folder / "modules.json"
    if not file.is_file():
        yield "Transformer", folder
        return
    for module in json.loads(file.read_text(encoding="utf-8")):
        path = str(module["type"]).split(".")
        if path[0] != _LIBRARY:
            raise ValueError(f"its module {module['type']} is code of its own, which is never run")
        subfolder = (folder / module["path"]).resolve()
        if not subfolder.is_relative_to(folder.resolve()):
            raise ValueError(f"its module {path[-1]} lies outside its folder")
        yield path[-1], subfolder


def _read(file: Path) -> dict[str, Any]:
    """The fields of a JSON file; empty if there is no file."""
    fields = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not isinstance(fields, dict):
        raise ValueError(f"{file.name} holds no fields")
    return fields


def _of_library(fields: Mapping[str, Any]) -> dict[str, Any]:
    prompts = {str(name): text for name, text in (fields.get("prompts") or {}).items() if isinstance(text, str)}
    default, similarity = fields.get("default_prompt_name"), fields.get("similarity_fn_name") or "cosine"
    if default is not None and default not in prompts:
        raise ValueError(f"its default prompt {default!r} has no text")
    if similarity not in get_args(Similarity):
        raise ValueError(f"its similarity {similarity!r} is not supported")
    return {"prompts": tuple(prompts.items()), "default_prompt": default, "similarity": similarity}


def _of_transformer(folder: Path) -> dict[str, Any]:
    # The file may be sentence_bert_config.json, sentence_roberta_config.json or another one.
    fields = next((_read(file) for file in sorted(folder.glob("sentence_*_config.json"))), {})
    max_length = fields.get("max_seq_length")
    return {
        "max_length": None if max_length is None else int(max_length),
        "lowercase": fields.get("do_lower_case") is True,
    }


def _of_pooling(fields: Mapping[str, Any]) -> dict[str, Any]:
    named = fields.get("pooling_mode") or [mode for flag, mode in _POOLING_FLAGS.items() if fields.get(flag)] or "mean"
    pooling = [named] if isinstance(named, str) else list(named)
    unknown = [mode for mode in pooling if mode not in get_args(Pooling)]
    if unknown:
        raise ValueError(f"its pooling {unknown[0]!r} is not supported")
    return {"pooling": tuple(pooling), "pools_prompt": fields.get("include_prompt") is not False}


def _dense(folder: Path) -> Dense:
    fields = _read(folder / "config.json")
    path = str(fields.get("activation_function", "torch.nn.modules.activation.Tanh")).split(".")
    supported = ("sentence_embedding", None)
    if fields.get("module_input_name") not in supported or fields.get("module_output_name") not in supported:
        raise ValueError("its module Dense is not applied to the text vector")
    if path[0] != "torch":
        raise ValueError(f"the activation {'.'.join(path)} of its module Dense is code of its own, which is never run")
    return Dense(folder, path[-1], fields.get("use_residual") is True)
