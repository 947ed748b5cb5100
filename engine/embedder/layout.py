"""What the files of an embedding model say besides its weights, in the layout of the library sentence-transformers.

That library itself would bring scikit-learn and scipy, read pickles where it finds them, tokenise on the thread that
computes, and take no tokens: what is needed of it are these few JSON files. A module that is not known here is refused.
Fields and defaults are those of sentence-transformers 6.2.
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

# Older files switch each way of pooling by itself; where several are on, this is their order.
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
    """A linear layer behind the pooled vector: the folder of its weights, its activation by name of torch.nn."""

    folder: Path
    activation: str = "Tanh"
    residual: bool = False


VectorStep = Dense | Literal["normalize"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a folder makes vectors.

    folder   that of the transformer and its tokenizer
    pooled   what the states of a text become, one behind the other; empty: the files do not say
    prompt   whether tokens of a prompt are pooled too
    steps    what happens to the vector then, in order
    longest  tokens of a text, special ones included; None: the files do not say
    lower    whether texts are read in lower case
    prompts  what is put before a text, by the name of its purpose
    default  the purpose of a text that has none
    """

    folder: Path
    pooled: tuple[Pooling, ...] = ()
    prompt: bool = True
    steps: tuple[VectorStep, ...] = ()
    longest: int | None = None
    lower: bool = False
    prompts: tuple[tuple[str, str], ...] = ()
    default: str | None = None
    similarity: Similarity = "cosine"


def read_layout(name: str, folder: Path) -> Layout:
    """The layout of the model `name` in a folder. Raises ModelUnsupported for what would give other vectors here."""
    try:
        modules = list(_modules(folder))
        fields: dict[str, Any] = {"folder": folder, **_of_library(_read(folder / "config_sentence_transformers.json"))}
        steps: list[VectorStep] = []
        for kind, place in modules:
            match kind:
                case "Transformer":
                    fields |= {"folder": place, **_of_transformer(place)}
                case "Pooling":
                    fields |= _of_pooling(_read(place / "config.json"))
                case "Dense":
                    steps.append(_dense(place))
                case "Normalize":
                    steps.append("normalize")
                case "Dropout":
                    pass  # it does nothing outside training
                case _:
                    raise ValueError(f"its module {kind} is not known here")
    except (ValueError, TypeError, AttributeError, KeyError, OSError) as error:
        raise ModelUnsupported(name, f"as an embedding model: {error}") from error
    return Layout(**fields, steps=tuple(steps))


def _modules(folder: Path) -> Iterator[tuple[str, Path]]:
    """The kinds of the model's modules and their folders, in order; a folder without a list is a transformer."""
    file = folder / "modules.json"
    if not file.is_file():
        yield "Transformer", folder
        return
    for module in json.loads(file.read_text(encoding="utf-8")):
        path = str(module["type"]).split(".")
        if path[0] != _LIBRARY:
            raise ValueError(f"its module {module['type']} is code of its own, which is never run")
        place = (folder / module["path"]).resolve()
        if not place.is_relative_to(folder.resolve()):
            raise ValueError(f"its module {path[-1]} lies outside its folder")
        yield path[-1], place


def _read(file: Path) -> dict[str, Any]:
    """The fields of a file; none where there is no file."""
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
        raise ValueError(f"its similarity {similarity!r} is not known here")
    return {"prompts": tuple(prompts.items()), "default": default, "similarity": similarity}


def _of_transformer(folder: Path) -> dict[str, Any]:
    # There are sentence_bert_config.json, sentence_roberta_config.json and others.
    fields = next((_read(file) for file in sorted(folder.glob("sentence_*_config.json"))), {})
    longest = fields.get("max_seq_length")
    return {
        "longest": None if longest is None else int(longest),
        "lower": fields.get("do_lower_case") is True,
    }


def _of_pooling(fields: Mapping[str, Any]) -> dict[str, Any]:
    named = (
        fields.get("pooling_mode") or [way for switch, way in _POOLING_FLAGS.items() if fields.get(switch)] or "mean"
    )
    pooled = [named] if isinstance(named, str) else list(named)
    unknown = [way for way in pooled if way not in get_args(Pooling)]
    if unknown:
        raise ValueError(f"its pooling {unknown[0]!r} is not known here")
    return {"pooled": tuple(pooled), "prompt": fields.get("include_prompt") is not False}


def _dense(folder: Path) -> Dense:
    fields = _read(folder / "config.json")
    path = str(fields.get("activation_function", "torch.nn.modules.activation.Tanh")).split(".")
    known = ("sentence_embedding", None)
    if fields.get("module_input_name") not in known or fields.get("module_output_name") not in known:
        raise ValueError("its module Dense is not about the vector of a text")
    if path[0] != "torch":
        raise ValueError(f"the activation {'.'.join(path)} of its module Dense is code of its own, which is never run")
    return Dense(folder, path[-1], fields.get("use_residual") is True)
