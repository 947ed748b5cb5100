"""Documented request fields that are not supported, and accepted fields without effect on the response.

A documented field (of OpenAI, or an extension of vLLM, SGLang or llama.cpp) is accepted with null or a neutral value
listed below; other values are answered 400 unsupported_parameter. Undocumented fields are answered 400
unknown_parameter. So no parameter is ignored silently; with --lenient, both become warnings in the response, and hints
always do.
"""

from __future__ import annotations

from collections.abc import Mapping

NeutralValues = Mapping[str, tuple[object, ...]]

# Accepted fields that no response depends on, with their purpose.
NOTED: Mapping[str, str] = {
    "user": "names the client's user; nothing depends on it",
    "safety_identifier": "names the client's user; nothing depends on it",
    "prompt_cache_key": "a routing hint; prefix caching needs none",
}

# Hints: left out with a warning, for the given reason, where the answer has `warnings`; elsewhere refused.
_CACHE_CONTROL = {"cache_control": "every prefix is cached without it"}
_RETENTION = {"prompt_cache_retention": "cached prefixes stay until their memory is needed"}
CHAT_HINTS: Mapping[str, str] = {
    **_CACHE_CONTROL,
    **_RETENTION,
    "background_options": "the answer is not computed in the background",
    "dynatemp_exponent": "there is no dynamic temperature",
    "mirostat_eta": "there is no mirostat sampler",
    "mirostat_tau": "there is no mirostat sampler",
    "store": "chats are not stored",
}
COMPLETION_HINTS: Mapping[str, str] = {
    name: CHAT_HINTS[name] for name in ("dynatemp_exponent", "mirostat_eta", "mirostat_tau")
}
PART_HINTS = _CACHE_CONTROL
MESSAGE_HINTS: Mapping[str, str] = {**_CACHE_CONTROL, "annotations": "it is not part of the prompt"}
RESPONSE_HINTS: Mapping[str, str] = {**_RETENTION, "background_options": "there are none"}
REASONING_HINTS: Mapping[str, str] = dict.fromkeys(
    ("summary", "generate_summary"), "the reasoning itself is shown, without a summary"
)

# OpenAI's fields for chat, with their neutral values, in alphabetical order.
CHAT: NeutralValues = {
    "audio": (),
    "background_options": (),
    "best_of": (1,),
    "cache_control": (),
    "echo": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_cache_retention": ("in_memory",),
    "store": (False,),
    "web_search_options": (),
}

# The same for completions, including fields that are meaningful for chats only.
COMPLETIONS: NeutralValues = {
    "chat_template_kwargs": ({},),
    "enable_thinking": (False,),
    "include_reasoning": (True, False),
    "parallel_tool_calls": (True, False),
    "prompt_cache_options": (),
    "reasoning": ({},),
    "reasoning_effort": ("none",),
    "thinking": ({"type": "disabled"},),
    "thinking_budget": (0,),
    "thinking_budget_tokens": (0,),
    "thinking_token_budget": (0,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (),
    "verbosity": ("medium",),
}

# Extensions of other servers, for both.
_EXTENSIONS = (
    "adaptive_decay adaptive_target chat_template documents dynatemp_exponent dynatemp_range grammar_lazy id_slot "
    "keep_alive kv_transfer_params length_penalty logits_processors lora lora_path mirostat mirostat_eta mirostat_tau "
    "mm_processor_kwargs n_cache_reuse n_discard n_predict n_probs prompt_embeds reasoning_format "
    "samplers session_id spaces_between_special_tokens speculative structural_tag tfs_z truncation "
    "use_beam_search vllm_xargs"
)
EXTENSIONS: NeutralValues = {
    **dict.fromkeys(_EXTENSIONS.split(), ()),
    "documents": ([],),
    "dynatemp_exponent": (1, 1.0),
    "dynatemp_range": (0, 0.0),
    "grammar_lazy": (False,),
    "id_slot": (-1,),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "lora": ([],),
    "mirostat": (0,),
    "mirostat_eta": (0.1,),
    "mirostat_tau": (5, 5.0),
    "mm_processor_kwargs": ({},),
    "n_cache_reuse": (0,),
    "n_discard": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "reasoning_format": ("auto", "deepseek"),
    # All samplers of llama.cpp by their letters, in its order of today and of before.
    "samplers": ("edskypmxt", "edkypmxt"),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True,),
    "tfs_z": (1, 1.0),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

# Fields of messages and calls that clients send back when a response is part of the history.
MESSAGE: NeutralValues = {
    "annotations": ([],),
    "audio": (),
}
FUNCTION_CALL: NeutralValues = {
    "custom": (),
}
CUSTOM_CALL: NeutralValues = {
    "function": (),
}

# The same for responses and the parts of their requests.
RESPONSES: NeutralValues = {
    **{name: values for name, values in EXTENSIONS.items() if name != "truncation"},
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "personality": (),
    "priority": (0,),
    "prompt": (),
    "prompt_cache_retention": ("in_memory",),
}
RESPONSE_CALL: NeutralValues = {
    "async": (False,),
    "caller": ({"type": "direct"},),
    "namespace": (),
}
RESPONSE_TOOL: NeutralValues = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}
RESPONSE_CACHE: NeutralValues = {
    "prewarm": (False,),
}
RESPONSE_REASONING: NeutralValues = {
    "context": ("auto", "all_turns"),
    "generate_summary": ("auto",),
    "mode": ("standard",),
    "summary": ("auto",),
}

# Fields of routes without generation.
EMBEDDINGS: NeutralValues = {
    "add_special_tokens": (True,),
    "embd_normalize": (2,),
    "normalize": (True,),
    "priority": (0,),
}
RERANK: NeutralValues = {
    "max_chunks_per_doc": (),
    "priority": (0,),
    "return_embeddings": (False,),
    "rid": (),
    "top_k": (),
    "truncation": (),
}
TOKENIZE: NeutralValues = {
    "chat_template": (),
    "mm_processor_kwargs": (),
    "parse_special": (True,),
}

# The same for Anthropic's messages.
ANTHROPIC: NeutralValues = {
    "container": (),
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
}
ANTHROPIC_BLOCK: NeutralValues = {
    "caller": ({"type": "direct"},),
    "citations": ([],),
    "toolset_name": (),
}
ANTHROPIC_TOOL: NeutralValues = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "eager_input_streaming": (True, False),
    "input_examples": ([],),
}

# The same for Ollama's chat and generate, their messages and their options.
OLLAMA: NeutralValues = {
    "context": ([],),
    "height": (),
    "steps": (),
    "suffix": ("",),
    "template": ("",),
    "truncate": (True, False),
    "width": (),
}
OLLAMA_OPTIONS: NeutralValues = {
    "mirostat": (0,),
    "mirostat_eta": (),
    "mirostat_tau": (),
    "penalize_newline": (True,),
    "tfs_z": (1, 1.0),
}

# All documented names, to distinguish unsupported from unknown fields.
DOCUMENTED = frozenset(
    {
        *CHAT,
        *COMPLETIONS,
        *EXTENSIONS,
        *MESSAGE,
        *FUNCTION_CALL,
        *CUSTOM_CALL,
        *RESPONSES,
        *RESPONSE_CALL,
        *RESPONSE_TOOL,
        *RESPONSE_CACHE,
        *RESPONSE_REASONING,
        *ANTHROPIC,
        *ANTHROPIC_BLOCK,
        *ANTHROPIC_TOOL,
        *EMBEDDINGS,
        *RERANK,
        *TOKENIZE,
        *OLLAMA,
        *OLLAMA_OPTIONS,
    }
)


def strip(body: dict[str, object], documented: NeutralValues) -> dict[str, object]:
    """`body` without documented fields that have a neutral value; pydantic refuses the remaining extra fields."""
    return {
        name: value
        for name, value in body.items()
        if name not in documented or not _is_neutral(value, documented[name])
    }


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    # Compared with its type, because True equals 1.
    return value is None or any(type(value) is type(known) and value == known for known in neutral)
