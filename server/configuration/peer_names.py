"""Names of options and commands in llama.cpp, Ollama, SGLang and vLLM, for errors that name Cellar's."""

from __future__ import annotations

import difflib
from collections.abc import Collection

# The option of Cellar without dashes, and the names of other servers, one-letter options with their dash.
_SAME = {
    "allowed-host": (
        *("allowed-origins", "api-allow-origin", "cors-allow-origins", "cors", "cors-origins", "enable-cors"),
    ),
    "api-key-file": ("api-keys-file",),
    "chat-template": ("chat-template-file",),
    "context": ("max-model-len", "ctx-size", "context-length", "context-size", "num-ctx", "-c"),
    "device": ("n-gpu-layers", "gpu-layers", "num-gpu", "main-gpu", "gpus", "-ngl", "-dev"),
    "disk-cache": ("slot-save-path", "prompt-cache"),
    "draft-model": ("model-draft", "speculative-model", "speculative-draft-model-path", "-md"),
    "draft-tokens": ("draft-max", "draft-n", "num-speculative-tokens", "speculative-num-draft-tokens"),
    "drafter": ("spec-type", "speculative-config", "speculative-algorithm"),
    "dtype": ("data-type",),
    "host-cache-bytes": ("swap-space", "cpu-offload-gb", "cache-ram"),
    "kv-dtype": ("kv-cache-dtype", "cache-type-k", "cache-type-v", "kv-cache-type", "-ctk", "-ctv"),
    "log-level": ("uvicorn-log-level", "log-verbosity", "verbosity"),
    "lora": ("lora-modules", "lora-paths", "lora-scaled", "adapter", "adapters"),
    "max-tokens": ("n-predict", "predict", "max-new-tokens", "num-predict", "-n"),
    "memory": ("gpu-memory-utilization", "mem-fraction-static"),
    "otlp-traces-endpoint": ("otlp-endpoint",),
    "overflow": ("context-shift", "no-context-shift"),
    "quantize": ("quantization", "load-in-4bit", "load-in-8bit", "-q"),
    "served-model-name": ("alias", "-a"),
    "slots": ("max-num-seqs", "parallel", "max-running-requests", "num-parallel", "-np"),
    "system": ("system-prompt", "-sys"),
    "temperature": ("temp",),
    "tensor-parallel": ("tensor-parallel-size", "tp-size", "tp", "-tp"),
    "threads": ("threads-batch", "num-thread", "-t", "-tb"),
    "itl-target-ms": ("max-num-batched-tokens", "chunked-prefill-size", "batch-size", "ubatch-size", "-b", "-ub"),
    "max-waiting": ("max-queue", "max-queued-requests"),
}
_PEER_NAMES = {name: option for option, names in _SAME.items() for name in names}
# Options without a counterpart.
_REMEDIES = {
    "The model is an argument: cellar serve MODEL.": ("-m", "model-path", "hf-repo", "-hf", "model-id"),
    "The prompt is an argument: cellar run MODEL PROMPT.": ("prompt", "-p"),
    "Prefix caching is always on.": ("enable-prefix-caching", "cache-prompt", "cache-reuse"),
    "Continuous batching and chunked prefill are always on.": ("enable-chunked-prefill", "cont-batching", "-cb"),
    "The format of tool calls and reasoning is detected from the chat template.": (
        *("enable-auto-tool-choice", "tool-call-parser", "reasoning-parser", "reasoning-format", "jinja"),
    ),
    "No code of a checkpoint is ever run.": ("trust-remote-code",),
    "cellar pull MODEL --revision REVISION downloads it and prints its folder.": ("revision", "hf-file", "-hff"),
    "Embeddings of the model need no option; --embedding-model adds a second model.": ("embedding", "embeddings"),
    "Metrics are always at /metrics.": ("metrics", "enable-metrics"),
    "--lora name=FOLDER, repeatable, and --lora-dir FOLDER are the options of LoRA adapters.": (
        *("enable-lora", "max-lora-rank", "lora-base", "lora-init-without-apply"),
    ),
    "The vision or audio tower of a checkpoint is loaded with it; docs/images.md has the limits.": (
        *("mmproj", "mmproj-url", "mm", "-mm", "limit-mm-per-prompt", "enable-multimodal"),
    ),
}
# Parameters of sampling and of single answers, which a server does not have as options.
_OF_REQUESTS = frozenset({"temperature", "top-p", "top-k", "min-p", "max-tokens", "seed", "system"})
_REMEDY_OF = {name: remedy for remedy, names in _REMEDIES.items() for name in names}
_COMMANDS = {
    "cellar models": ("list", "ls", "ps", "tags"),
    "cellar models remove NAME": ("rm", "remove", "delete", "uninstall"),
    "cellar plan MODEL": ("show", "info", "inspect"),
    "cellar pull MODEL": ("get", "download", "fetch"),
    "cellar serve MODEL": ("start", "server", "load", "api", "up"),
    "cellar run MODEL PROMPT": ("generate", "complete", "ask", "prompt"),
    "cellar chat MODEL": ("repl", "cli", "interactive"),
    "cellar bench MODEL": ("benchmark", "perf"),
    "cellar convert SOURCE TARGET": ("quantize", "export"),
    "cellar doctor": ("env", "collect-env", "check", "status"),
}
_COMMAND_OF = {name: command for command, names in _COMMANDS.items() for name in names}


def nearest_option(key: str, keys: Collection[str]) -> str:
    """The option that a key without dashes most likely means: its name in Cellar, or the most similar one."""
    option = _PEER_NAMES.get(key)
    return option if option is not None and option in keys else difflib.get_close_matches(key, keys, 1, 0.0)[0]


def option_remedy(flag: str, flags: Collection[str]) -> str | None:
    """A sentence about an option of another server, given the flags of the command; None: the option is unknown."""
    name = flag[2:] if flag.startswith("--") else flag
    option = _PEER_NAMES.get(name)
    if option is not None and f"--{option}" in flags:
        return f"Its name in Cellar is --{option}."
    if (option or name) in _OF_REQUESTS:
        field = (option or name).replace("-", "_")
        place = "a message with the role system" if field == "system" else f"their parameter {field}"
        return f"Requests have it: {place}, or --{option or name} of cellar run and cellar chat."
    return _REMEDY_OF.get(name)


def missing_option(key: str, keys: Collection[str]) -> str | None:
    """A sentence about a key of an option that Cellar does not have; None if it has one of another name, or the key is
    unknown.
    """
    return None if _PEER_NAMES.get(key) in keys else option_remedy(f"--{key}", ())


def command_remedy(name: str) -> str | None:
    """The command of Cellar for a command of another program; None: it is unknown."""
    return _COMMAND_OF.get(name)
