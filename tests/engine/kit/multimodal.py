"""Tiny random models with images, video or audio beside their text: settings of one for each type of transformers.

The settings are those of the type's default configuration, made small by the name of each setting.
`python -W ignore -m tests.engine.kit.multimodal` loads the text of each, and prints the table of docs/models.md
(a minute).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

from engine.errors import ModelUnsupported
from engine.run.sequential import SequentialRunner
from tests.engine.kit.families import plant
from tests.engine.kit.models import load_model, save_tokenizer

VOCABULARY = 300
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 299,
    "pad_token_id": 0,
    "sliding_window": 12,
    "attention_chunk_size": 12,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Of towers, which run in no test.
_TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "projection_dim", "output_dim"), 16),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 24),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads", "encoder_attention_heads"), 2),
    "head_dim": 8,
    "num_mel_bins": 8,
    "image_size": 16,
    "patch_size": 4,
    "deepstack_visual_indexes": [0],
}
_PLACEHOLDERS = {"image_token": 290, "video_token": 291, "audio_token": 292}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_HALF = {**_ROTARY, "mrope_section": [1, 1, 0]}

# By type, the settings of its text that differ.
TYPES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        [
            "aria",
            "aya_vision",
            "cohere2_vision",
            "deepseek_vl",
            "exaone4_5",
            "fuyu",
            "gemma3",
            "gemma4",
            "glmasr",
            "got_ocr2",
            "hyperclovax_vision_v2",
            "idefics2",
            "idefics3",
            "internvl",
            "lfm2_vl",
            "lfm3_vl",
            "lighton_ocr",
            "llama4",
            "llava",
            "llava_next",
            "llava_next_video",
            "llava_onevision",
            "minicpm_ocr",
            "minicpmv4_6",
            "minicpmv4_7",
            "minimax_m3_vl",
            "mistral3",
            "moss_transcribe_diarize",
            "muse_glimmer",
            "ovis2",
            "phi4_multimodal",
            "qianfan_ocr",
            "qwen2_audio",
            "qwen3_asr",
            "smolvlm",
            "video_llama_3",
            "video_llava",
            "vipllava",
            "voxtral",
            "gemma4_unified",
        ],
        {},
    ),
    **dict.fromkeys(
        ["glm46v", "glm4v", "paddleocr_vl", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl"],
        {"rope_parameters": _ROTARY},
    ),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
        {"rope_parameters": {**_ROTARY, "mrope_interleaved": True, "partial_rotary_factor": 1.0}},
    ),
    "kimi_k25": {"num_key_value_heads": 4},
    **dict.fromkeys(("glm4v_moe", "glm_ocr"), {"rope_parameters": _HALF}),
    "step3p7": {"sliding_window": 12, "share_expert_dim": 16},
    "mistral4": {"num_key_value_heads": 4, "head_dim": 16},
    "mistral_large4": {"num_key_value_heads": 4, "head_dim": 16},
}

# By type, the settings that are not those of its text.
_OUTER = {"qwen2_5_omni_thinker": {"vision_start_token_id": 293, "audio_start_token_id": 294}}
# Refused types: settings of the text, and a part of the reason.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "glm5_next": (
        {
            "num_key_value_heads": 4,
            "qk_rope_head_dim": 0,
            "head_dim": 0,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 32,
        },
        "nor one sequence at a time",
    ),
    "paligemma": ({}, "attend to later ones"),
}
# Types whose memory cannot be planned: their layers choose by values.
UNPLANNED = ("mistral_large4", "step3p7")
# Types that do not run natively, with the reason.
NOT_NATIVE = {
    "lfm3_vl": "the input of the output projection is not the output of the operation before it",
    "minimax_m3_vl": "its MLP has another activation",
    "mistral_large4": "it runs one sequence at a time",
    "muse_glimmer": "the input of a projection is not the output of the operation before it",
    "step3p7": "its queries, keys and values are computed by other operations",
}


def tiny_config(kind: str, **text: Any) -> Any:
    """The configuration of a tiny model of a type; `text` are settings of its text."""
    default = AutoConfig.for_model(kind)
    parts = {name: _part(default, name) for name in default.sub_configs}
    parts = {name: part for name, part in parts.items() if part is not None}
    own: dict[str, Any] = {}
    for name, part in parts.items():
        is_text = part is default.get_text_config()
        small = _small(part, _TEXT if is_text else _TOWER) | ({**TYPES.get(kind, {}), **text} if is_text else {})
        own[name] = {**small, "model_type": part.model_type}
    if default.get_text_config() is default:
        own |= {**_small(default, _TEXT), **TYPES.get(kind, {}), **text}
    for name, token in _PLACEHOLDERS.items():
        own |= {key: token for key in (f"{name}_id", f"{name}_index") if hasattr(default, key)}
    return AutoConfig.for_model(kind, **own, **_OUTER.get(kind, {}))


def whole_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The model with all its parts."""
    kinds = (AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForCausalLM)
    kind = next(kind for kind in kinds if type(config) in kind._model_mapping)
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    plant(model)
    return model


def _part(default: Any, name: str) -> Any:
    """The configuration of a part, also of one that models lack by default; None: it has no own type."""
    part, kind = getattr(default, name, None), default.sub_configs[name]
    return kind() if part is None and kind is not AutoConfig else part


def _small(part: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """The settings of a configuration that have a small value."""
    settings = part.to_dict()
    return {name: value for name, value in sizes.items() if settings.get(name) is not None}


def table() -> Iterator[str]:
    """The lines of the table."""
    yield "| type | parts not read | text |"
    yield "|---|---|---|"
    for kind in sorted({**TYPES, **REFUSED}):
        settings, _ = REFUSED.get(kind, ({}, ""))
        with tempfile.TemporaryDirectory() as name:
            whole_model(tiny_config(kind, **settings)).save_pretrained(name)
            save_tokenizer(Path(name))
            try:
                loaded = load_model(Path(name), "float32")
            except ModelUnsupported as error:
                yield f"| {kind} | | refused: {str(error).partition(': ')[2] or error} |"
                continue
        packed = "sequential" if isinstance(loaded.runner, SequentialRunner) else "packed"
        reason = loaded.info.not_native_reason
        text = "native" if reason is None else f"{packed}: {reason}"
        yield f"| {kind} | {', '.join(loaded.info.unread_modalities)} | {text} |"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for line in table():
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
