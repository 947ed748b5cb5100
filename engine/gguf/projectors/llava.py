"""The towers of LLaVA 1.5: CLIP without its last layer, and an MLP."""

from __future__ import annotations

from typing import Any

from engine.gguf.architectures.settings import Fields
from engine.gguf.container import GgufError
from engine.gguf.projectors.projector import ProcessorFiles, Projector, TowerFile
from engine.gguf.projectors.tower import TowerTensors

_KIND = r"\.(weight|bias)"
_BLOCK = r"vision_tower\.encoder\.layers\.(\d+)\."

_TENSORS = (
    TowerTensors(r"vision_tower\.embeddings\.class_embedding", ("v.class_embd",)),
    TowerTensors(r"vision_tower\.embeddings\.patch_embedding\.weight", ("v.patch_embd.weight",)),
    TowerTensors(r"vision_tower\.embeddings\.position_embedding\.weight", ("v.position_embd.weight",)),
    TowerTensors(rf"vision_tower\.pre_layrnorm{_KIND}", (r"v.pre_ln.\1",)),
    # It normalises a pooled output, which is not used and which files lack: any values of its shape do.
    TowerTensors(rf"vision_tower\.post_layernorm{_KIND}", (r"v.pre_ln.\1",)),
    TowerTensors(rf"{_BLOCK}layer_norm([12]){_KIND}", (r"v.blk.\1.ln\2.\3",)),
    TowerTensors(rf"{_BLOCK}self_attn\.([qkv])_proj{_KIND}", (r"v.blk.\1.attn_\2.\3",)),
    TowerTensors(rf"{_BLOCK}self_attn\.out_proj{_KIND}", (r"v.blk.\1.attn_out.\2",)),
    TowerTensors(rf"{_BLOCK}mlp\.fc1{_KIND}", (r"v.blk.\1.ffn_up.\2",)),
    TowerTensors(rf"{_BLOCK}mlp\.fc2{_KIND}", (r"v.blk.\1.ffn_down.\2",)),
    TowerTensors(rf"multi_modal_projector\.linear_1{_KIND}", (r"mm.0.\1",)),
    TowerTensors(rf"multi_modal_projector\.linear_2{_KIND}", (r"mm.2.\1",)),
)


def _settings(file: TowerFile, text: Any) -> Fields:
    layers = file.integers("feature_layer")
    if file.knows("image_grid_pinpoints") or len(layers) > 1 or layers not in ([], [file.size("block_count")]):
        raise GgufError("its tiles or feature layers are not those of LLaVA 1.5")
    tower = {
        "hidden_act": "gelu" if file.flag("use_gelu") else "quick_gelu",
        "layer_norm_eps": file.number("attention.layer_norm_epsilon", 1e-5),
    }
    return {
        "vision_config": {"model_type": "clip_vision_model", **file.tower(), **tower},
        "image_seq_length": file.side**2,
        # Files end with the layer whose output the projector reads.
        "vision_feature_layer": -1,
    }


def _processor(file: TowerFile) -> ProcessorFiles:
    size = file.size("image_size")
    return ProcessorFiles(
        "LlavaProcessor",
        "CLIPImageProcessor",
        {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}, **file.pixels()},
        {
            "patch_size": file.size("patch_size"),
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    )


LLAVA = Projector(
    "mlp",
    ("llama", "mistral"),
    "llava",
    _settings,
    {"image_token_id": "<image>", "image_token_index": "<image>"},
    _TENSORS,
    _processor,
    # The projection_dim of its files is that of CLIP.
    width=lambda file: file.rows("mm.2.weight"),
)
