"""One tiny random model a family, and what has to hold for it: rows of the table in docs/models.md.

`python -m tests.engine.families` runs every check on every family and prints the table (minutes).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine import hooks, recurrence
from engine.plan import LayerPlan, plan_layers
from engine.runner import Runner
from kvcache.cache import Cache
from kvcache.spec import Span

VOCABULARY = 260
LENGTH = 24
# Windows and chunks of attention shorter than the prompts, so that they matter.
SHORT = 6

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
_WINDOW = {"sliding_window": SHORT}
_SCALED = {"query_pre_attn_scalar": 16}

FAMILIES: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in [
            "llama",
            "mixtral",
            "ministral3",
            "qwen2",
            "qwen3",
            "gemma",
            "phi",
            "phi3",
            "phimoe",
            "olmo",
            "olmo2",
            "olmoe",
            "flex_olmo",
            "glm",
            "glm4",
            "cohere",
            "smollm3",
            "granite",
            "granitemoe",
            "granitemoeshared",
            "stablelm",
            "gpt_neox",
            "starcoder2",
            "nemotron",
            "persimmon",
            "seed_oss",
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "ernie4_5",
            "ernie4_5_moe",
            "minimax_m2",
            "solar_open",
            "helium",
            "apertus",
            "arcee",
            "bitnet",
            "jetmoe",
            "nanochat",
            "cwm",
            "modernbert-decoder",
        ]
    },
    **{name: _WINDOW for name in ("mistral", "ministral", "cohere2", "exaone4", "olmo3", "mimo_v2_flash", "afmoe")},
    "qwen2_moe": _MOE,
    "qwen3_moe": _MOE,
    "glm4_moe": _ROUTED,
    "gemma2": {**_WINDOW, **_SCALED},
    "gemma3_text": {**_WINDOW, **_SCALED},
    "vaultgemma": {**_WINDOW, **_SCALED},
    "gpt_oss": {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {"num_local_experts": 2, "attention_chunk_size": SHORT, "intermediate_size_mlp": 64},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "deepseek_v2": {**_ROUTED, **_LATENT},
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "glm4_moe_lite": {**_ROUTED, **_LATENT},
    "youtu": _LATENT,
    "minicpm3": _LATENT,
    "longcat_flash": {
        **_LATENT,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "zero_expert_num": 1,
        "expert_ffn_hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_layers": 2,
    },
    "qwen3_next": {**_MOE, **_DELTA, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": _DELTA,
    "olmo_hybrid": _DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "lfm2_moe": {**_MOE, "layer_types": ["conv", "full_attention", "conv"]},
    "mamba": {"state_size": 8, "intermediate_size": 128},
    "falcon_mamba": {"state_size": 8, "intermediate_size": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128},
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
    },
    "zamba2": {
        "mamba_d_state": 16,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "hybrid_layer_ids": [1],
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": False,
        "adapter_rank": 8,
    },
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "hybrid_override_pattern": "M*M-",
        "num_hidden_layers": 4,
    },
    "kimi_linear": {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32},
}


@dataclass(frozen=True, slots=True)
class Family:
    """A tiny model of one family, ready to run over cells, and the prompt that it is checked with."""

    name: str
    model: Any
    layers: tuple[LayerPlan, ...]
    recurrent: bool
    prompt: tuple[int, ...]

    def cache(self) -> Cache:
        """An empty cache for it."""
        specs = [plan.spec for plan in self.layers]
        state_bytes = 2**30 if self.recurrent else None
        return Cache(specs, slots=4, capacity=2 * LENGTH, cells=8 * LENGTH, state_bytes=state_bytes)

    def feed(self, cache: Cache, *parts: tuple[int, tuple[int, ...]]) -> list[Tensor]:
        """One forward that appends (slot, tokens) parts; the logits after each."""
        spans = [Span(slot, cache.length(slot), len(tokens)) for slot, tokens in parts]
        tokens = [token for _, tokens in parts for token in tokens]
        wanted = torch.tensor([span.length for span in spans]).cumsum(0) - 1
        with cache.forward(spans) as forward:
            return list(Runner(self.model, self.layers).run(forward, tokens, wanted.tolist()))

    def alone(self, tokens: tuple[int, ...]) -> Tensor:
        """The logits after some tokens, by transformers without us."""
        self.model.set_attn_implementation("eager")
        with torch.inference_mode():
            logits: Tensor = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        self.model.set_attn_implementation(hooks.NAME)
        return logits

    def agrees(self, expected: Tensor, actual: Tensor) -> bool:
        """Whether two rows of logits are the same but for rounding."""
        return float((expected - actual).abs().max()) <= 1e-3 * max(1.0, float(expected.abs().max()))


def build(name: str) -> Family:
    """The model of a family. Raises what transformers raises where it cannot be run packed."""
    # Tiny layers: a second thread would only be waited for (measured 10 times slower on busy cores).
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings = {**_BASE, **FAMILIES[name]}
    if "n_embd" in settings:
        settings = {key: value for key, value in settings.items() if key not in _NAMED_OTHERWISE}
    config = AutoConfig.for_model(name, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.set_attn_implementation(hooks.NAME)
    recurrent = recurrence.install(model)
    hooks.install_latent(model)
    generator = torch.Generator().manual_seed(1)
    prompt = tuple(torch.randint(3, VOCABULARY, (LENGTH,), generator=generator).tolist())
    return Family(name, model, plan_layers(model, vocabulary=VOCABULARY), recurrent, prompt)


_NAMED_OTHERWISE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")


def batched(family: Family) -> bool:
    """Three sequences in one forward get the logits that each gets alone."""
    cache, prompt = family.cache(), family.prompt
    parts = ((0, prompt), (1, prompt[3:]), (2, prompt[9:12]))
    packed = family.feed(cache, *parts)
    return all(family.agrees(family.alone(tokens), row) for (_, tokens), row in zip(parts, packed, strict=True))


def chunked(family: Family) -> bool:
    """A prompt in chunks of 1 and 5, beside a neighbour, gets the logits of one forward."""
    expected = family.alone(family.prompt)
    for size in (1, 5):
        cache, row = family.cache(), expected
        for at in range(0, LENGTH, size):
            row = family.feed(cache, (2, family.prompt[at : at + size]), (3, family.prompt[:1]))[0]
        if not family.agrees(expected, row):
            return False
    return True


def copied(family: Family) -> bool:
    """copy_prefix from a running slot, at every length: the rest computed gives the logits of a cold start."""
    expected = family.alone(family.prompt)
    cache = family.cache()
    for at in range(0, LENGTH, 6):
        family.feed(cache, (0, family.prompt[at : at + 6]))
    for length in range(LENGTH):
        standing = cache.copy_prefix(0, 1, length)
        if standing > length or not family.agrees(expected, family.feed(cache, (1, family.prompt[standing:]))[0]):
            return False
    return True


def resumed(family: Family) -> bool:
    """A prompt that leaves a remembered one at any position gets the logits of a cold start."""
    cache = family.cache()
    for at in range(0, LENGTH, 6):
        family.feed(cache, (0, family.prompt[at : at + 6]))
        cache.remember(0, family.prompt[: at + 6])
    cache.clear(0)
    for length in range(1, LENGTH):
        prompt = (*family.prompt[:length], 258, 259)
        standing = cache.recall(1, prompt[:-1])
        if not family.agrees(family.alone(prompt), family.feed(cache, (1, prompt[standing:]))[0]):
            return False
        cache.clear(1)
    return True


def shifted(family: Family) -> str:
    """How the context shifts: keys turned, or computed anew; either way the slot stands at most where it was asked."""
    cache = family.cache()
    family.feed(cache, (0, family.prompt))
    standing = cache.shift(0, 4, 8)
    rest = (*family.prompt[:4], *family.prompt[12:])[standing:]
    row = family.feed(cache, (0, (*rest, 7)))[0]
    if not bool(torch.isfinite(row).all()):
        return "FAIL"
    if standing == LENGTH - 8:
        return "turned"
    cold = family.alone((*family.prompt[:4], *family.prompt[12:], 7))
    return "recomputed" if family.agrees(cold, row) else "FAIL"


CHECKS: dict[str, Callable[[Family], bool]] = {
    "batched": batched,
    "chunked": chunked,
    "copy_prefix": copied,
    "resume at every position": resumed,
}


def row(name: str) -> list[str]:
    """One row of the table."""
    family = build(name)
    kinds = {plan.spec.reach.kind for plan in family.layers} | ({"recurrent"} if family.recurrent else set())
    kinds |= {"latent"} if any(plan.spec.value_width == 0 for plan in family.layers) else set()
    results = ["PASS" if check(family) else "FAIL" for check in CHECKS.values()]
    return [name, ", ".join(sorted(kinds)), *results, shifted(family)]


def table() -> Iterator[str]:
    """The table, line by line."""
    heads = ["family", "memory", *CHECKS, "shift"]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for name in sorted(FAMILIES):
        yield f"| {' | '.join(row(name))} |"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for line in table():
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
