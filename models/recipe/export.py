"""Finished models as folders that transformers loads offline."""

import json
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.recipe.plan import Plan
from models.recipe.rows import END

READABLE = 0o644


def export(plan: Plan, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Write the weights as bfloat16, the configuration and the tokenizer into the plan's folder."""
    folder = plan.folder
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=0)
    model.to(torch.bfloat16).save_pretrained(folder)
    # The template goes inside, so that a reader of tokenizer_config.json alone finds it too.
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    _settle(folder / "tokenizer_config.json")
    for file in folder.iterdir():
        # safetensors writes 0600, which another user's server could not read (transformers 5.23).
        file.chmod(READABLE)
    return folder


def _settle(file: Path) -> None:
    """Name the tokenizer class that every version knows, and drop where it was loaded from."""
    settings = json.loads(file.read_text(encoding="utf-8"))
    for passing in ("is_local", "local_files_only", "backend"):
        settings.pop(passing, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
