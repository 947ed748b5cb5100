"""The table of projectors."""

from __future__ import annotations

from typing import Any

from engine.gguf.architectures.settings import Fields
from engine.gguf.container import GgufError
from engine.gguf.projectors.gemma4 import GEMMA4
from engine.gguf.projectors.internvl import INTERNVL
from engine.gguf.projectors.llava import LLAVA
from engine.gguf.projectors.pixtral import PIXTRAL
from engine.gguf.projectors.projector import ProcessorFiles, Projector, TowerFile
from engine.gguf.projectors.qwen import QWEN
from engine.gguf.projectors.tower import TowerTensors

_KIND = r"\.(weight|bias)"
_BLOCK = r"\.encoder\.layers\.(\d+)\."


def _siglip_tensors(tower: str) -> tuple[TowerTensors, ...]:
    block = tower + _BLOCK
    return (
        TowerTensors(rf"{tower}\.embeddings\.patch_embedding{_KIND}", (r"v.patch_embd.\1",)),
        TowerTensors(rf"{tower}\.embeddings\.position_embedding\.weight", ("v.position_embd.weight",)),
        TowerTensors(rf"{tower}\.post_layernorm{_KIND}", (r"v.post_ln.\1",)),
        TowerTensors(rf"{block}layer_norm([12]){_KIND}", (r"v.blk.\1.ln\2.\3",)),
        TowerTensors(rf"{block}self_attn\.([qkv])_proj{_KIND}", (r"v.blk.\1.attn_\2.\3",)),
        TowerTensors(rf"{block}self_attn\.out_proj{_KIND}", (r"v.blk.\1.attn_out.\2",)),
        TowerTensors(rf"{block}mlp\.fc1{_KIND}", (r"v.blk.\1.ffn_up.\2",)),
        TowerTensors(rf"{block}mlp\.fc2{_KIND}", (r"v.blk.\1.ffn_down.\2",)),
    )


def _gemma3_tokens(file: TowerFile) -> int:
    """Tokens of an image."""
    return (file.side // file.size("projector.scale_factor", 4)) ** 2


def _gemma3(file: TowerFile, text: Any) -> Fields:
    tower = {"layer_norm_eps": file.number("attention.layer_norm_epsilon", 1e-6), "vision_use_head": False}
    return {
        "vision_config": {"model_type": "siglip_vision_model", **file.tower(), **tower},
        "mm_tokens_per_image": _gemma3_tokens(file),
    }


def _gemma3_processor(file: TowerFile) -> ProcessorFiles:
    size = file.size("image_size")
    return ProcessorFiles(
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        {"size": {"height": size, "width": size}, **file.pixels()},
        {"image_seq_length": _gemma3_tokens(file)},
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    )


def _idefics3(file: TowerFile, text: Any) -> Fields:
    tower = {"layer_norm_eps": file.number("attention.layer_norm_epsilon", 1e-6)}
    return {
        "vision_config": {"model_type": "idefics3_vision", **file.tower(), **tower},
        "scale_factor": file.size("projector.scale_factor", 2),
    }


def _idefics3_processor(file: TowerFile) -> ProcessorFiles:
    size = file.size("image_size")
    longest = file.size("preproc_image_size", size)
    tiles = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": size}}
    rows = file.side // file.size("projector.scale_factor", 2)
    return ProcessorFiles(
        "Idefics3Processor", "Idefics3ImageProcessor", {**tiles, **file.pixels()}, {"image_seq_len": rows**2}
    )


PROJECTORS = (
    GEMMA4,
    INTERNVL,
    LLAVA,
    *QWEN,
    *PIXTRAL,
    Projector(
        "gemma3",
        ("gemma3_text",),
        "gemma3",
        _gemma3,
        {
            "image_token_index": "<image_soft_token>",
            "image_token_id": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        (
            *_siglip_tensors("vision_tower"),
            TowerTensors(r"multi_modal_projector\.mm_input_projection_weight", ("mm.input_projection.weight",)),
            TowerTensors(
                r"multi_modal_projector\.mm_soft_emb_norm\.weight",
                ("mm.soft_emb_norm.weight",),
                lambda values, _: values[0] - 1,
            ),
        ),
        _gemma3_processor,
    ),
    Projector(
        "idefics3",
        ("llama",),
        "idefics3",
        _idefics3,
        {"image_token_id": "<image>"},
        (
            *_siglip_tensors("vision_model"),
            TowerTensors(r"connector\.modality_projection\.proj\.weight", ("mm.model.fc.weight",)),
        ),
        _idefics3_processor,
        text_prefix="text_model.",
    ),
)


def projector_of(file: TowerFile, text: Any) -> Projector:
    """The projector of a file for a text configuration. Raises GgufError."""
    named = [row for row in PROJECTORS if row.name == file.projector and row.applies(file)]
    if not named:
        names = ", ".join(dict.fromkeys(row.name for row in PROJECTORS))
        raise GgufError(f"its projector {file.projector} is not supported; supported: {names}")
    fitting = next((row for row in named if text.model_type in row.texts), None)
    if fitting is None:
        raise GgufError(f"its projector {file.projector} does not fit a text model of type {text.model_type}")
    return fitting
