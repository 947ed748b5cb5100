"""Prefix cache diagnostics: why a prompt, or a part of it, was not found in the cache."""

from __future__ import annotations

from engine.types.events import Finished, Usage
from server.generation.chat_turn import ChatTurn
from server.schemas.chat import PromptCacheDiagnostics


async def cache_diagnostics(turn: ChatTurn, finished: Finished) -> PromptCacheDiagnostics:
    """Diagnostics of the turn's prompt, from the end of its first choice."""
    cost, request = finished.usage, turn.requests[0]
    # Other requests may have computed more of it while this one waited for them.
    matched = max(cost.matched_tokens, cost.cached_tokens)
    diagnostics = PromptCacheDiagnostics(
        cached_tokens=cost.cached_tokens,
        missed_tokens=cost.prompt_tokens - cost.cached_tokens,
        reason=None,
        first_divergent_token=None,
        first_divergent_message=None,
    )
    # The last token of a prompt is always computed, because its logits are needed.
    if cost.cached_tokens >= cost.prompt_tokens - 1:
        return diagnostics
    if turn.cache_bypassed:
        return {**diagnostics, "reason": "bypassed"}
    if request.score_from is not None:
        return {**diagnostics, "reason": "scored"}
    if matched < cost.prompt_tokens - 1:
        diagnostics["first_divergent_token"] = matched
        diagnostics["first_divergent_message"] = await turn.message_locator.message_at(matched)
    if cost.cached_tokens < matched:
        return {**diagnostics, "reason": "unreachable"}
    if matched == 0:
        return {**diagnostics, "reason": "unknown"}
    return {**diagnostics, "reason": "diverged" if _diverged(cost) else "ended"}


def _diverged(cost: Usage) -> bool:
    """Whether cached tokens differ after the matched prefix; also after waiting for a prefix that ends early."""
    return cost.diverged or cost.cached_tokens > cost.matched_tokens
