"""Entries of images and sounds as named tensors, for the files of the encoder cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.step.content import ContentEntry, TensorTree
from kvcache.component import SavedTensors
from kvcache.encoder_files import EntryCodec

# JSON in UTF-8: the arguments, with numbers in place of tensors.
_ARGUMENTS = "arguments"
_ROWS, _FEATURES = "rows", "features"


def _encode(entry: ContentEntry) -> SavedTensors:
    """ValueError for an argument with other leaves than tensors and plain values."""
    tensors: list[Tensor] = []
    trees = [_plain(dict(tree), tensors) for tree in (entry.token_arguments, entry.feature_arguments)]
    text = np.frombuffer(json.dumps(trees).encode(), dtype=np.uint8).copy()
    content = {_ROWS: entry.rows, _FEATURES: entry.features, _ARGUMENTS: torch.from_numpy(text)}
    content |= {f"{number}": tensor for number, tensor in enumerate(tensors)}
    # Copies: arguments may share memory.
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in content.items()
    }


def _decode(digest: bytes, content: SavedTensors, device: torch.device) -> ContentEntry:
    """The features stay on the CPU. Raises ValueError or KeyError."""
    by_token, by_feature = json.loads(content[_ARGUMENTS].numpy().tobytes())
    tensors = {name: tensor.to(device) for name, tensor in content.items() if name not in (_ARGUMENTS, _FEATURES)}
    return ContentEntry(
        digest, tensors[_ROWS], _tree(by_token, tensors), _tree(by_feature, tensors), content[_FEATURES]
    )


def _plain(tree: TensorTree, tensors: list[Tensor]) -> list[Any]:
    """A tree in JSON: the type of each branch and its content; its tensors are appended to `tensors`."""
    match tree:
        case Tensor():
            tensors.append(tree)
            return ["tensor", len(tensors) - 1]
        case Mapping():
            if not all(isinstance(key, str) for key in tree):
                raise ValueError("an argument has keys that are no text")
            return ["mapping", {key: _plain(branch, tensors) for key, branch in tree.items()}]
        case tuple() | list():
            return [type(tree).__name__, [_plain(branch, tensors) for branch in tree]]
        case None | bool() | int() | float() | str():
            return ["value", tree]
    raise ValueError(f"an argument has a {type(tree).__name__}")


def _tree(plain: Sequence[Any], tensors: Mapping[str, Tensor]) -> TensorTree:
    kind, value = plain
    match kind:
        case "tensor":
            return tensors[f"{value}"]
        case "mapping":
            return {key: _tree(branch, tensors) for key, branch in value.items()}
        case "tuple":
            return tuple(_tree(branch, tensors) for branch in value)
        case "list":
            return [_tree(branch, tensors) for branch in value]
    return value


CONTENT_CODEC = EntryCodec("contents", _encode, _decode)
