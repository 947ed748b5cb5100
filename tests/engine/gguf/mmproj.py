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
_KINDS = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")


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
    # The converter of LLaVA wrote that of CLIP, which the model does not use.
    projected = vision["projection_dim"] if family.projector == "mlp" else config["text_config"]["hidden_size"]
    writer.add_vision_projection_dim(width or projected)
    writer.add_vision_patch_size(_side(vision["patch_size"]))
    writer.add_vision_image_mean(pixels["image_mean"])
    writer.add_vision_image_std(pixels["image_std"])
    family.metadata(writer, config, pixels)
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, _LAYERS)
    for key, values in load_file(source / "model.safetensors").items():
        for published, tensor in family.tensors(key, values, vision):
            target = names.get_name(published, _KINDS) or published
            kind = stored_type(tensor, matrix_type)
            writer.add_tensor(target, quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_type(tensor: Any, matrix_type: str) -> GGMLQuantizationType:
    """The type of a tensor in a file whose matrices have a type; F16 files have convolutions in F16, too."""
    is_rounded = tensor.ndim == 2 or (tensor.ndim == 4 and matrix_type == "F16")
    return GGMLQuantizationType[matrix_type if is_rounded else "F32"]


def _side(size: int | list[int]) -> int:
    return size if isinstance(size, int) else size[0]


def _add_tower(writer: GGUFWriter, vision: dict[str, Any]) -> None:
    writer.add_vision_image_size(_side(vision["image_size"]))
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


def _add_gemma4(writer: GGUFWriter, config: dict[str, Any], pixels: dict[str, Any]) -> None:
    vision = config["vision_config"]
    # The converter writes it for all files, since none has an image size.
    _add_tower(writer, {"image_size": 224, **vision})
    writer.add_vision_attention_layernorm_eps(vision["rms_norm_eps"])
    if vision["pooling_kernel_size"] != 3:
        writer.add_vision_projector_scale_factor(vision["pooling_kernel_size"])


def _gemma4_tensors(key: str, values: Any, vision: dict[str, Any]) -> Named:
    if not key.startswith(("model.vision_tower.", "model.embed_vision.")):
        return
    if key == "model.embed_vision.embedding_projection.weight":
        # Of the encoder of audio, which is not read.
        yield "mm.a.input_projection.weight", values
        yield "a.pre_encode.out.bias", values[0]
    if key.endswith("patch_embedder.input_proj.weight"):
        side = vision["patch_size"]
        values = values.reshape(len(values), side, side, 3).transpose(0, 3, 1, 2)
    key = key.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    yield key + (".weight" if key.endswith("position_embedding_table") else ""), np.atleast_1d(values)


def _add_idefics3(writer: GGUFWriter, config: dict[str, Any], pixels: dict[str, Any]) -> None:
    _add_tower(writer, config["vision_config"])
    writer.add_vision_attention_layernorm_eps(config["vision_config"]["layer_norm_eps"])
    writer.add_vision_projector_scale_factor(config["scale_factor"])
    writer.add_vision_preproc_image_size(pixels["size"]["longest_edge"])


def _idefics3_tensors(key: str, values: Any, vision: dict[str, Any]) -> Named:
    if key.startswith(("model.vision_model.", "model.connector.")):
        yield key, values


def _add_qwen(writer: GGUFWriter, config: dict[str, Any], pixels: dict[str, Any]) -> None:
    vision = config["vision_config"]
    writer.add_vision_image_size(560)
    first = "embed_dim" in vision
    writer.add_vision_embedding_length(vision["embed_dim" if first else "hidden_size"])
    writer.add_vision_feed_forward_length(vision["hidden_size" if first else "intermediate_size"])
    writer.add_vision_block_count(vision["depth"])
    writer.add_vision_head_count(vision["num_heads"])
    writer.add_vision_min_pixels(pixels["size"]["shortest_edge"])
    writer.add_vision_max_pixels(pixels["size"]["longest_edge"])
    if "fullatt_block_indexes" in vision:
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
    if "deepstack_visual_indexes" in vision:
        writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
        deep = vision["deepstack_visual_indexes"]
        writer.add_vision_is_deepstack_layers([layer in deep for layer in range(vision["depth"])])


def _qwen_tensors(key: str, values: Any, vision: dict[str, Any]) -> Named:
    key = key.removeprefix("model.")
    if not key.startswith("visual."):
        return
    deep = vision.get("deepstack_visual_indexes")
    if key == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", values[:, :, 0]
        yield "v.patch_embd.weight.1", values[:, :, 1]
    elif deep is None and ".qkv." in key:
        for letter, part in zip("qkv", np.split(values, 3), strict=True):
            yield key.replace("qkv", letter), part
    elif key.startswith("visual.deepstack_merger_list."):
        number, part = key.split(".", 3)[2:]
        yield f"v.deepstack.{deep[int(number)]}.{part.replace('linear_', '')}", values
    elif deep is not None and key.startswith("visual.merger."):
        names = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
        _, _, part, kind = key.split(".")
        yield f"{names[part]}.{kind}", values
    else:
        yield key, values


def _add_pixtral(writer: GGUFWriter, config: dict[str, Any], pixels: dict[str, Any]) -> None:
    _add_tower(writer, config["vision_config"])
    writer.add_vision_attention_layernorm_eps(1e-5)
    writer.add_vision_use_gelu(True)


def _pixtral_tensors(key: str, values: Any, vision: dict[str, Any]) -> Named:
    if key.endswith(("q_proj.weight", "k_proj.weight")):
        heads = values.reshape(vision["num_attention_heads"], 2, -1, values.shape[-1])
        values = heads.swapaxes(1, 2).reshape(values.shape)
    if key.startswith(("vision_tower.", "multi_modal_projector.")):
        yield key, values


def _add_internvl(writer: GGUFWriter, config: dict[str, Any], pixels: dict[str, Any]) -> None:
    _add_tower(writer, config["vision_config"])
    writer.add_vision_attention_layernorm_eps(config["vision_config"]["layer_norm_eps"])
    writer.add_vision_use_gelu(True)
    writer.add_vision_projector_scale_factor(int(1 / config["downsample_ratio"]))
    writer.add_vision_preproc_max_tiles(pixels["max_patches"])


_INTERNVL_PROJECTOR = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}


def _internvl_tensors(key: str, values: Any, vision: dict[str, Any]) -> Named:
    key = key.removeprefix("model.")
    if key.startswith("multi_modal_projector."):
        _, part, kind = key.split(".")
        yield f"{_INTERNVL_PROJECTOR[part]}.{kind}", values
    elif key.startswith("vision_tower."):
        is_named_weight = "lambda_" in key or key.endswith("position_embeddings")
        yield f"model.{key}" + (".weight" if is_named_weight else ""), values


def _add_llava(writer: GGUFWriter, config: dict[str, Any], pixels: dict[str, Any]) -> None:
    vision = config["vision_config"]
    _add_tower(writer, vision | {"num_hidden_layers": vision["num_hidden_layers"] - 1})
    writer.add_vision_attention_layernorm_eps(vision["layer_norm_eps"])
    writer.add_bool("clip.use_gelu", vision["hidden_act"] == "gelu")


_LLAVA_NAMES = {
    "vision_tower.": "v.",
    "encoder.layers.": "blk.",
    "embeddings.": "",
    "embedding": "embd",
    "self_attn.": "attn_",
    "layer_norm": "ln",
    "pre_layrnorm": "pre_ln",
    "mlp.fc1": "ffn_down",
    "mlp.fc2": "ffn_up",
    "multi_modal_projector.linear_1": "mm.0",
    "multi_modal_projector.linear_2": "mm.2",
    "_proj.": ".",
}


def _llava_tensors(key: str, values: Any, vision: dict[str, Any]) -> Named:
    """By the first converter, which exchanged the matrices of an MLP and left out the last layer."""
    key = key.removeprefix("model.").replace("vision_model.", "")
    last = f".layers.{vision['num_hidden_layers'] - 1}."
    if not key.startswith(("vision_tower.", "multi_modal_projector.")) or last in key or "post_layernorm" in key:
        return
    for name, short in _LLAVA_NAMES.items():
        key = key.replace(name, short)
    yield key, values


FAMILIES = {
    "qwen2_vl": Converted(VisionProjectorType.QWEN2VL, _add_qwen, _qwen_tensors),
    "qwen2_5_vl": Converted(VisionProjectorType.QWEN25VL, _add_qwen, _qwen_tensors),
    **dict.fromkeys(("qwen3_vl", "qwen3_5"), Converted(VisionProjectorType.QWEN3VL, _add_qwen, _qwen_tensors)),
    "pixtral": Converted(VisionProjectorType.PIXTRAL, _add_pixtral, _pixtral_tensors),
    **dict.fromkeys(("gemma3", "gemma3_wide"), Converted(VisionProjectorType.GEMMA3, _add_gemma3, _gemma3_tensors)),
    **dict.fromkeys(("gemma4", "gemma4_large"), Converted("gemma4v", _add_gemma4, _gemma4_tensors)),
    "internvl": Converted(VisionProjectorType.INTERNVL, _add_internvl, _internvl_tensors),
    "llava": Converted("mlp", _add_llava, _llava_tensors),
    "smolvlm": Converted(VisionProjectorType.IDEFICS3, _add_idefics3, _idefics3_tensors),
}
