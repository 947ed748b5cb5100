"""Why a prompt was not found in the cache, or not all of it."""

from __future__ import annotations

from engine.types.events import Finished, Usage
from server.generation.chat_turn import ChatTurn
from server.schemas.chat import PromptCacheDiagnostics


async def cache_diagnostics(turn: ChatTurn, finished: Finished) -> PromptCacheDiagnostics:
    """What became of the prompt of a turn, whose first choice `finished` so."""
    cost, request = finished.usage, turn.requests[0]
    # Others may have computed more of it while it waited for them.
    known = max(cost.matched_tokens, cost.cached_tokens)
    found = PromptCacheDiagnostics(
        cached_tokens=cost.cached_tokens,
        missed_tokens=cost.prompt_tokens - cost.cached_tokens,
        reason=None,
        first_divergent_token=None,
        first_divergent_message=None,
    )
    # The last token of a prompt is always computed: without its row there are no logits.
    if cost.cached_tokens >= cost.prompt_tokens - 1:
        return found
    if turn.cache_bypassed:
        return {**found, "reason": "bypassed"}
    if request.score_from is not None:
        return {**found, "reason": "scored"}
    if known < cost.prompt_tokens - 1:
        found["first_divergent_token"] = known
        found["first_divergent_message"] = await turn.message_locator.message_at(known)
    if cost.cached_tokens < known:
        return {**found, "reason": "unreachable"}
    if known == 0:
        return {**found, "reason": "unknown"}
    return {**found, "reason": "diverged" if _diverged(cost) else "ended"}


def _diverged(cost: Usage) -> bool:
    """Whether what is known goes on differently; so do those that it waited for, as far as they were of use."""
    return cost.diverged or cost.cached_tokens > cost.matched_tokens
