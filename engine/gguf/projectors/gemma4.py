"""The towers of Gemma 4. Its encoder of audio, which the same file may hold, is not read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engine.gguf.architectures.settings import Fields
from engine.gguf.projectors.projector import ProcessorFiles, Projector, TowerFile
from engine.gguf.projectors.tower import TowerTensors

_BLOCK = r"vision_tower\.encoder\.layers\.(\d+)\."
_QUERY = "v.blk.0.attn_q"
_NORMS = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
}
# Parameters of a matrix: its weight, and the limits of its inputs and outputs.
_MATRIX = r"\.(?:linear\.)?(weight|input_min|input_max|output_min|output_max)"


def _colours_last(values: Sequence[Tensor], heads: int) -> Tensor:
    """A convolution as a matrix for patches whose pixels have their colours side by side."""
    return values[0].permute(0, 2, 3, 1)


_TENSORS = (
    TowerTensors(r"vision_tower\.patch_embedder\.input_proj\.weight", ("v.patch_embd.weight",), _colours_last),
    TowerTensors(r"vision_tower\.patch_embedder\.position_embedding_table", ("v.position_embd.weight",)),
    *(TowerTensors(rf"{_BLOCK}{name}\.weight", (rf"v.blk.\1.{tensor}.weight",)) for name, tensor in _NORMS.items()),
    TowerTensors(rf"{_BLOCK}self_attn\.([qk])_norm\.weight", (r"v.blk.\1.attn_\2_norm.weight",)),
    TowerTensors(rf"{_BLOCK}self_attn\.([qkv])_proj{_MATRIX}", (r"v.blk.\1.attn_\2.\3",)),
    TowerTensors(rf"{_BLOCK}self_attn\.o_proj{_MATRIX}", (r"v.blk.\1.attn_out.\2",)),
    TowerTensors(rf"{_BLOCK}mlp\.(gate|up|down)_proj{_MATRIX}", (r"v.blk.\1.ffn_\2.\3",)),
    TowerTensors(r"vision_tower\.std_(bias|scale)", (r"v.std_\1",)),
    TowerTensors(r"embed_vision\.embedding_projection\.weight", ("mm.input_projection.weight",)),
)


def _pooled(file: TowerFile) -> int:
    """Patches in a row that become one token."""
    return file.size("projector.scale_factor", 3)


def _settings(file: TowerFile, text: Any) -> Fields:
    tower, positions = file.tower(), file.shape("v.position_embd.weight")
    del tower["image_size"]
    heads = file.size("attention.head_count")
    return {
        "vision_config": {
            **tower,
            "num_key_value_heads": heads,
            "head_dim": file.rows(f"{_QUERY}.weight") // heads,
            "rms_norm_eps": file.number("attention.layer_norm_epsilon", 1e-6),
            "pooling_kernel_size": _pooled(file),
            "position_embedding_size": positions[-2] if len(positions) > 1 else 0,
            "use_clipped_linears": file.has(f"{_QUERY}.input_max"),
            "standardize": file.has("v.std_bias"),
        },
        "audio_config": None,
    }


def _text(text: Fields) -> Fields:
    """In the published models, the tokens of an image see each other unless layers have inputs per token."""
    visible = None if text["hidden_size_per_layer_input"] else "vision"
    return text | {"use_bidirectional_attention": visible}


def _processor(file: TowerFile) -> ProcessorFiles:
    return ProcessorFiles(
        "Gemma4Processor",
        "Gemma4ImageProcessor",
        {"patch_size": file.size("patch_size"), "pooling_kernel_size": _pooled(file)},
        {"feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}},
        {
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            # The processor of images needs these two as well.
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
    )


GEMMA4 = Projector(
    "gemma4v",
    ("gemma4_text",),
    "gemma4",
    _settings,
    {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"},
    _TENSORS,
    _processor,
    text=_text,
    ignored=(r"(mm\.)?a\..*",),
)
