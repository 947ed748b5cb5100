"""Which fields a request may have that this version does not honour.

A field that somebody documents (OpenAI, or the extensions of vLLM and llama.cpp) is accepted while its value asks for
nothing: null, or one of the values below. With another value it is answered 400 unsupported_parameter. A field that
nobody documents is answered 400 unknown_parameter. So no parameter is ever ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping

# What OpenAI documents for chat, with the values that ask for nothing. The order is OpenAI's, the alphabet.
CHAT: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}

# The same for completions.
COMPLETIONS: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "n": (1,),
    "suffix": (),
}

# Extensions that other servers document, for both.
_EXTENSIONS = (
    "adaptive_decay adaptive_target allowed_token_ids bad_words best_of cache_prompt chat_template "
    "documents dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent "
    "dynatemp_range echo ebnf grammar grammar_lazy guided_choice guided_grammar guided_json guided_regex id_slot "
    "include_reasoning include_stop_str_in_output json_schema keep_alive kv_transfer_params length_penalty "
    "logits_processors logprob_token_ids lora lora_path min_tokens mirostat mirostat_eta mirostat_tau "
    "mm_processor_kwargs n_cache_reuse n_discard n_keep n_predict n_probs priority prompt_embeds prompt_logprobs "
    "reasoning_format regex repeat_last_n repeat_penalty request_id return_progress return_token_ids "
    "return_tokens_as_token_ids samplers session_id skip_special_tokens spaces_between_special_tokens speculative "
    "stop_regex stream_interval structural_tag structured_outputs thinking thinking_budget_tokens "
    "thinking_token_budget timeout timings_per_token top_n_sigma truncate_prompt_tokens truncation typical_p "
    "use_beam_search vllm_xargs xtc_probability xtc_threshold"
)
EXTENSIONS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(_EXTENSIONS.split(), ()),
    "cache_prompt": (True,),
    "repeat_penalty": (1, 1.0),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}

# Fields of a message that come back when a client sends an answer on as history.
MESSAGE: Mapping[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}

# Every documented name, to tell a field that is not supported from one that does not exist.
DOCUMENTED = frozenset({*CHAT, *COMPLETIONS, *EXTENSIONS, *MESSAGE})


def strip(body: object, documented: Mapping[str, tuple[object, ...]]) -> object:
    """`body` without the documented fields that ask for nothing. What is left over, pydantic refuses as extra."""
    if not isinstance(body, dict):
        return body
    return {
        name: value
        for name, value in body.items()
        if name not in documented or not _asks_nothing(value, documented[name])
    }


def _asks_nothing(value: object, idle: tuple[object, ...]) -> bool:
    # By type too: True equals 1.
    return value is None or any(type(value) is type(known) and value == known for known in idle)
