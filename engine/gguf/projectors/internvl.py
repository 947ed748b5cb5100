"""The towers of InternVL 2.5 to 3.5."""

from __future__ import annotations

from typing import Any

from engine.gguf.architectures.settings import Fields
from engine.gguf.projectors.projector import ProcessorFiles, Projector, TowerFile
from engine.gguf.projectors.tower import TowerTensors

_KIND = r"\.(weight|bias)"
_BLOCK = r"vision_tower\.encoder\.layer\.(\d+)\."
# Of the published configurations, for files that have none.
_MIN_TILES, _MAX_TILES = 1, 12

_TENSORS = (
    TowerTensors(r"vision_tower\.embeddings\.cls_token", ("v.class_embd",)),
    TowerTensors(r"vision_tower\.embeddings\.position_embeddings", ("v.position_embd.weight",)),
    TowerTensors(rf"vision_tower\.embeddings\.patch_embeddings\.projection{_KIND}", (r"v.patch_embd.\1",)),
    TowerTensors(rf"{_BLOCK}layernorm_before{_KIND}", (r"v.blk.\1.ln1.\2",)),
    TowerTensors(rf"{_BLOCK}layernorm_after{_KIND}", (r"v.blk.\1.ln2.\2",)),
    TowerTensors(rf"{_BLOCK}attention\.([qkv])_proj{_KIND}", (r"v.blk.\1.attn_\2.\3",)),
    TowerTensors(rf"{_BLOCK}attention\.([qk])_norm\.weight", (r"v.blk.\1.attn_\2_norm.weight",)),
    TowerTensors(rf"{_BLOCK}attention\.projection_layer{_KIND}", (r"v.blk.\1.attn_out.\2",)),
    TowerTensors(rf"{_BLOCK}mlp\.fc1{_KIND}", (r"v.blk.\1.ffn_up.\2",)),
    TowerTensors(rf"{_BLOCK}mlp\.fc2{_KIND}", (r"v.blk.\1.ffn_down.\2",)),
    TowerTensors(rf"{_BLOCK}lambda_([12])", (r"v.blk.\1.ls\2.weight",)),
    TowerTensors(rf"multi_modal_projector\.layer_norm{_KIND}", (r"mm.model.mlp.0.\1",)),
    TowerTensors(rf"multi_modal_projector\.linear_1{_KIND}", (r"mm.model.mlp.1.\1",)),
    TowerTensors(rf"multi_modal_projector\.linear_2{_KIND}", (r"mm.model.mlp.3.\1",)),
)


def _scale(file: TowerFile) -> int:
    """Patches in a row that become one token."""
    return file.size("projector.scale_factor", 2)


def _tokens(file: TowerFile) -> int:
    """Tokens of a tile."""
    return (file.side // _scale(file)) ** 2


def _settings(file: TowerFile, text: Any) -> Fields:
    tower = {
        "hidden_act": "silu" if file.flag("use_silu") else "gelu",
        "layer_norm_eps": file.number("attention.layer_norm_epsilon", 1e-6),
        "norm_type": "layer_norm" if file.has("v.blk.0.ln1.bias") else "rms_norm",
        "attention_bias": file.has("v.blk.0.attn_q.bias"),
        "use_qk_norm": file.has("v.blk.0.attn_q_norm.weight"),
    }
    return {
        "vision_config": {"model_type": "internvl_vision", **file.tower(), **tower},
        "downsample_ratio": 1 / _scale(file),
        "image_seq_length": _tokens(file),
    }


def _processor(file: TowerFile) -> ProcessorFiles:
    size = file.size("image_size")
    tiles = {
        "crop_to_patches": True,
        "min_patches": file.size("preproc_min_tiles", _MIN_TILES),
        "max_patches": file.size("preproc_max_tiles", _MAX_TILES),
    }
    return ProcessorFiles(
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        {"size": {"height": size, "width": size}, **tiles, **file.pixels()},
        {"image_seq_length": _tokens(file)},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    )


INTERNVL = Projector(
    "internvl",
    ("qwen2", "qwen3", "qwen3_moe"),
    "internvl",
    _settings,
    {"image_token_id": "<IMG_CONTEXT>"},
    _TENSORS,
    _processor,
)
