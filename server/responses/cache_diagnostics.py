"""Cache diagnostics: the common prefix of a prompt and an earlier response's prompt, and the reason of a cache miss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.schemas.response_items import CacheDiagnostics, MissReason, ResponseBody


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """Two prompts.

    shared  tokens of their common prefix
    prompt  tokens of the new prompt
    reason  of the first difference; None: the new prompt continues the whole earlier one
    """

    shared: int
    prompt: int
    reason: MissReason | None

    def verdict(self, cached: int) -> CacheDiagnostics:
        """The diagnostics of the new prompt with `cached` cached tokens."""
        if self.reason is not None:
            return CacheDiagnostics(
                type="cache_miss",
                reason=self.reason,
                cache_missed_tokens=self.prompt - self.shared,
                comparison_reusable_tokens=self.shared,
            )
        # The last token of a prompt is always computed. OpenAI has no name for a prefix that was evicted meanwhile.
        return CacheDiagnostics(type="cache_hit" if cached >= self.shared - 1 else "unavailable")


def compare(earlier: ResponseBody, old: Sequence[int], later: ResponseBody, new: Sequence[int]) -> PromptComparison:
    """The comparison of the prompt `new` of `later` with the prompt `old` of `earlier`."""
    pairs = zip(old, new, strict=False)
    shared = next(
        (position for position, (earlier_token, later_token) in enumerate(pairs) if earlier_token != later_token),
        min(len(old), len(new)),
    )
    return PromptComparison(shared, len(new), None if shared == len(old) else _miss_reason(earlier, later))


def _miss_reason(earlier: ResponseBody, later: ResponseBody) -> MissReason:
    """The first differing setting of those in front of the input in a prompt, or the input."""
    if earlier["model"] != later["model"]:
        return "model_changed"
    if earlier["tools"] != later["tools"]:
        return "tools_changed"
    if earlier["text"].get("format") != later["text"].get("format"):
        return "text_format_changed"
    if earlier["reasoning"]["effort"] != later["reasoning"]["effort"]:
        return "reasoning_effort_changed"
    if earlier["text"].get("verbosity") != later["text"].get("verbosity"):
        return "verbosity_changed"
    return "input_changed"
