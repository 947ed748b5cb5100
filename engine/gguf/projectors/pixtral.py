"""The towers of Pixtral and Mistral 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engine.gguf.architectures.settings import Fields
from engine.gguf.projectors.projector import ProcessorFiles, Projector, TowerFile
from engine.gguf.projectors.tower import TowerTensors

_BLOCK = r"vision_tower\.transformer\.layers\.(\d+)\."
_MERGE = "spatial_merge_size"


def _halves(values: Sequence[Tensor], heads: int) -> Tensor:
    """Query or key rows: files rotate neighbouring columns of a head, transformers rotates its halves."""
    rows = values[0]
    return rows.reshape(heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


_TENSORS = (
    TowerTensors(r"vision_tower\.patch_conv\.weight", ("v.patch_embd.weight",)),
    TowerTensors(r"vision_tower\.ln_pre\.weight", ("v.pre_ln.weight",)),
    TowerTensors(rf"{_BLOCK}attention_norm\.weight", (r"v.blk.\1.ln1.weight",)),
    TowerTensors(rf"{_BLOCK}ffn_norm\.weight", (r"v.blk.\1.ln2.weight",)),
    TowerTensors(rf"{_BLOCK}attention\.([qk])_proj\.weight", (r"v.blk.\1.attn_\2.weight",), _halves),
    TowerTensors(rf"{_BLOCK}attention\.v_proj\.weight", (r"v.blk.\1.attn_v.weight",)),
    TowerTensors(rf"{_BLOCK}attention\.o_proj\.weight", (r"v.blk.\1.attn_out.weight",)),
    TowerTensors(rf"{_BLOCK}feed_forward\.(gate|up|down)_proj\.weight", (r"v.blk.\1.ffn_\2.weight",)),
    TowerTensors(r"multi_modal_projector\.linear_([12])\.(weight|bias)", (r"mm.\1.\2",)),
    TowerTensors(r"multi_modal_projector\.norm\.weight", ("mm.input_norm.weight",)),
    TowerTensors(r"multi_modal_projector\.patch_merger\.merging_layer\.weight", ("mm.patch_merger.weight",)),
)


def _settings(file: TowerFile, text: Any) -> Fields:
    activation = "silu" if file.flag("use_silu") else "gelu"
    return {
        "vision_config": {"model_type": "pixtral", **file.tower(), "hidden_act": activation},
        "multimodal_projector_bias": file.has("mm.1.bias"),
        "vision_feature_layer": -1,
    }


def _pixtral(file: TowerFile, text: Any) -> Fields:
    return _settings(file, text) | {"vision_feature_select_strategy": "full"}


def _mistral3(file: TowerFile, text: Any) -> Fields:
    return _settings(file, text) | {_MERGE: file.size(_MERGE)}


def _processor(file: TowerFile) -> ProcessorFiles:
    patch = file.size("patch_size")
    return ProcessorFiles(
        "PixtralProcessor",
        "PixtralImageProcessor",
        {
            "size": {"longest_edge": file.size("image_size")},
            "patch_size": {"height": patch, "width": patch},
            **file.pixels(),
        },
        {"patch_size": patch, _MERGE: file.size(_MERGE, 1)},
    )


PIXTRAL = tuple(
    Projector(
        "pixtral",
        ("llama", "mistral", "ministral3"),
        model,
        settings,
        {"image_token_id": "[IMG]", "image_token_index": "[IMG]"},
        _TENSORS,
        _processor,
        applies=applies,
        # The embedding of the token between rows, which the text has too.
        ignored=(r"v\.token_embd\.img_break(\.weight)?",),
    )
    for model, settings, applies in (
        ("mistral3", _mistral3, lambda file: file.knows(_MERGE)),
        ("llava", _pixtral, lambda file: not file.knows(_MERGE)),
    )
)
