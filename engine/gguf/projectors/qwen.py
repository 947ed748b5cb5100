"""The towers of Qwen2-VL to Qwen3.5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.gguf.architectures.settings import Fields
from engine.gguf.container import GgufError
from engine.gguf.projectors.projector import ProcessorFiles, Projector, TowerFile
from engine.gguf.projectors.tower import TowerTensors

_KIND = r"\.(weight|bias)"
_BLOCK = r"visual\.blocks\.(\d+)\."
# Of the published processors, in tokens of an image.
_MIN_TOKENS, _DEEP_MIN_TOKENS, _MAX_TOKENS = 4, 64, 16384
_WINDOW = 112
_UP = "v.blk.0.ffn_up.weight"


def _frames(values: Sequence[Tensor], heads: int) -> Tensor:
    """A convolution over two frames, of which files have one each."""
    return torch.stack(list(values), 2)


def _rows(values: Sequence[Tensor], heads: int) -> Tensor:
    return torch.cat(list(values))


_COMMON = (
    TowerTensors(r"visual\.patch_embed\.proj\.weight", ("v.patch_embd.weight", "v.patch_embd.weight.1"), _frames),
    TowerTensors(rf"{_BLOCK}norm([12]){_KIND}", (r"v.blk.\1.ln\2.\3",)),
    TowerTensors(rf"{_BLOCK}attn\.proj{_KIND}", (r"v.blk.\1.attn_out.\2",)),
)
_FIRST = (
    *_COMMON,
    TowerTensors(
        rf"{_BLOCK}attn\.qkv{_KIND}", (r"v.blk.\1.attn_q.\2", r"v.blk.\1.attn_k.\2", r"v.blk.\1.attn_v.\2"), _rows
    ),
    TowerTensors(rf"visual\.merger\.ln_q{_KIND}", (r"v.post_ln.\1",)),
    TowerTensors(rf"visual\.merger\.mlp\.([02]){_KIND}", (r"mm.\1.\2",)),
    TowerTensors(rf"{_BLOCK}mlp\.(?:fc1|up_proj){_KIND}", (r"v.blk.\1.ffn_up.\2",)),
    TowerTensors(rf"{_BLOCK}mlp\.(?:fc2|down_proj){_KIND}", (r"v.blk.\1.ffn_down.\2",)),
    TowerTensors(rf"{_BLOCK}mlp\.gate_proj{_KIND}", (r"v.blk.\1.ffn_gate.\2",)),
)
_DEEP = (
    *_COMMON,
    TowerTensors(r"visual\.patch_embed\.proj\.bias", ("v.patch_embd.bias",)),
    TowerTensors(r"visual\.pos_embed\.weight", ("v.position_embd.weight",)),
    TowerTensors(rf"{_BLOCK}attn\.qkv{_KIND}", (r"v.blk.\1.attn_qkv.\2",)),
    TowerTensors(rf"{_BLOCK}mlp\.linear_fc1{_KIND}", (r"v.blk.\1.ffn_up.\2",)),
    TowerTensors(rf"{_BLOCK}mlp\.linear_fc2{_KIND}", (r"v.blk.\1.ffn_down.\2",)),
    TowerTensors(rf"visual\.merger\.norm{_KIND}", (r"v.post_ln.\1",)),
    TowerTensors(rf"visual\.merger\.linear_fc1{_KIND}", (r"mm.0.\1",)),
    TowerTensors(rf"visual\.merger\.linear_fc2{_KIND}", (r"mm.2.\1",)),
    TowerTensors(rf"visual\.deepstack_merger_list\.(\d+)\.norm{_KIND}", (r"v.deepstack.\1.norm.\2",)),
    TowerTensors(rf"visual\.deepstack_merger_list\.(\d+)\.linear_(fc[12]){_KIND}", (r"v.deepstack.\1.\2.\3",)),
)


def _merge(file: TowerFile) -> int:
    """Patches in a row that become one token."""
    return file.size("spatial_merge_size", 2)


def _tower(file: TowerFile) -> Fields:
    return {
        "depth": file.size("block_count"),
        "num_heads": file.size("attention.head_count"),
        "patch_size": file.size("patch_size"),
        "spatial_merge_size": _merge(file),
    }


def _qwen2(file: TowerFile, text: Any) -> Fields:
    width = file.size("embedding_length")
    sizes = {"embed_dim": width, "hidden_size": text.hidden_size, "mlp_ratio": file.rows(_UP) // width}
    return {"vision_config": _tower(file) | sizes}


def _qwen25(file: TowerFile, text: Any) -> Fields:
    depth, period = file.size("block_count"), file.size("n_wa_pattern")
    tower = {
        "hidden_size": file.size("embedding_length"),
        "out_hidden_size": text.hidden_size,
        "intermediate_size": file.rows(_UP),
        "window_size": file.size("window_size", _WINDOW),
        "fullatt_block_indexes": list(range(period - 1, depth, period)),
    }
    return {"vision_config": _tower(file) | tower}


def _deep(file: TowerFile, text: Any) -> Fields:
    tower = {
        "hidden_size": file.size("embedding_length"),
        "out_hidden_size": text.hidden_size,
        "intermediate_size": file.rows(_UP),
        "num_position_embeddings": file.rows("v.position_embd.weight"),
    }
    return {"vision_config": _tower(file) | tower}


def _qwen3(file: TowerFile, text: Any) -> Fields:
    fields = _deep(file, text)
    return {"vision_config": fields["vision_config"] | {"deepstack_visual_indexes": file.deep_layers}}


def _processor(name: str, min_tokens: int, file: TowerFile) -> ProcessorFiles:
    patch, merge = file.size("patch_size"), _merge(file)
    token = (patch * merge) ** 2
    size = {
        "shortest_edge": file.size("image_min_pixels", min_tokens * token),
        "longest_edge": file.size("image_max_pixels", _MAX_TOKENS * token),
    }
    patches = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": 2}
    return ProcessorFiles(name, "Qwen2VLImageProcessor", {"size": size, **patches, **file.pixels()})


def _sections(text: Fields) -> Fields:
    """The settings with the sections of three-axis rotary positions."""
    sections = text.pop("mrope_section", None)
    if sections is None:
        raise GgufError("the language model has no rope.dimension_sections")
    del text["model_type"]
    return text | {"rope_parameters": text["rope_parameters"] | {"mrope_section": sections}}


def _interleaved(text: Fields) -> Fields:
    text = _sections(text)
    return text | {"rope_parameters": text["rope_parameters"] | {"mrope_interleaved": True}}


def _same(text: Fields) -> Fields:
    return text


_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
QWEN = (
    Projector(
        "qwen2vl_merger",
        ("qwen2",),
        "qwen2_vl",
        _qwen2,
        _TOKENS,
        _FIRST,
        lambda file: _processor("Qwen2VLProcessor", _MIN_TOKENS, file),
        text=_sections,
    ),
    Projector(
        "qwen2.5vl_merger",
        ("qwen2",),
        "qwen2_5_vl",
        _qwen25,
        _TOKENS,
        _FIRST,
        lambda file: _processor("Qwen2_5_VLProcessor", _MIN_TOKENS, file),
        text=_sections,
    ),
    *(
        Projector(
            "qwen3vl_merger",
            (text,),
            model,
            settings,
            _TOKENS,
            _DEEP,
            lambda file: _processor("Qwen3VLProcessor", _DEEP_MIN_TOKENS, file),
            text=text_settings,
        )
        for text, model, settings, text_settings in (
            ("qwen3", "qwen3_vl", _qwen3, _interleaved),
            ("qwen3_5_text", "qwen3_5", _deep, _same),
            ("qwen3_5_moe_text", "qwen3_5_moe", _deep, _same),
        )
    ),
)
