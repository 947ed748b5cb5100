"""Writes the vision tower of a tiny checkpoint as an mmproj file, with the names of the gguf package."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, VisionProjectorType, get_tensor_name_map, quantize
from safetensors.numpy import load_file

from engine.convert.convert import Conversion, convert

Named = Iterator[tuple[str, Any]]
_LAYERS = 8


@dataclass(frozen=True)
class Converted:
    """How a family is written: its metadata, and its tensors by the names of published checkpoints."""

    projector: str
    metadata: Callable[[GGUFWriter, dict[str, Any], dict[str, Any]], None]
    tensors: Callable[[str, Any, dict[str, Any]], Named]


def write_pair(name: str, source: Path, target: Path) -> Path:
    """The GGUF file of a checkpoint's text in the folder `target`, with the mmproj file beside it."""
    file = target / "model.gguf"
    convert(Conversion(str(source), file, "f32", False, lambda _: None, lambda *_: None, pre_tokenizer="gpt-2"))
    write_mmproj(name, source, target / "mmproj-model-f32.gguf")
    return file


def write_mmproj(name: str, source: Path, file: Path, *, matrix_type: str = "F32", width: int | None = None) -> None:
    """The mmproj file of a checkpoint.

    width  of the language model that it claims to be for
    """
    family, config = FAMILIES[name], json.loads((source / "config.json").read_text())
    pixels = json.loads((source / "preprocessor_config.json").read_text())
    vision = config["vision_config"]
    writer = GGUFWriter(file, "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(family.projector)
    writer.add_vision_projection_dim(width or config["text_config"]["hidden_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_image_mean(pixels["image_mean"])
    writer.add_vision_image_std(pixels["image_std"])
    family.metadata(writer, config, pixels)
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, _LAYERS)
    for key, values in load_file(source / "model.safetensors").items():
        for published, tensor in family.tensors(key, values, vision):
            target = names.get_name(published, (".weight", ".bias")) or published
            kind = GGMLQuantizationType[matrix_type if tensor.ndim == 2 else "F32"]
            writer.add_tensor(target, quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tower(writer: GGUFWriter, vision: dict[str, Any]) -> None:
    writer.add_vision_image_size(vision["image_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["num_hidden_layers"])
    writer.add_vision_head_count(vision["num_attention_heads"])


def _add_gemma3(writer: GGUFWriter, config: dict[str, Any], pixels: dict[str, Any]) -> None:
    vision = config["vision_config"]
    _add_tower(writer, vision)
    writer.add_vision_attention_layernorm_eps(vision["layer_norm_eps"])
    rows = vision["image_size"] // vision["patch_size"]
    writer.add_vision_projector_scale_factor(rows // int(config["mm_tokens_per_image"] ** 0.5))


def _gemma3_tensors(key: str, values: Any, vision: dict[str, Any]) -> Named:
    if "soft_emb_norm" in key:
        values = values + 1
    if key.startswith(("vision_tower.", "multi_modal_projector.")):
        key = key.replace("vision_tower.", "vision_tower.vision_model.").replace("_weight", ".weight")
        yield key, values


def _add_idefics3(writer: GGUFWriter, config: dict[str, Any], pixels: dict[str, Any]) -> None:
    _add_tower(writer, config["vision_config"])
    writer.add_vision_attention_layernorm_eps(config["vision_config"]["layer_norm_eps"])
    writer.add_vision_projector_scale_factor(config["scale_factor"])
    writer.add_vision_preproc_image_size(pixels["size"]["longest_edge"])


def _idefics3_tensors(key: str, values: Any, vision: dict[str, Any]) -> Named:
    if key.startswith(("model.vision_model.", "model.connector.")):
        yield key, values


FAMILIES = {
    "gemma3": Converted(VisionProjectorType.GEMMA3, _add_gemma3, _gemma3_tensors),
    "smolvlm": Converted(VisionProjectorType.IDEFICS3, _add_idefics3, _idefics3_tensors),
}
