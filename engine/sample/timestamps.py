"""The constraint of Whisper's timestamps, as in transformers' WhisperTimeStampLogitsProcessor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.types.request import TimestampRule


@dataclass(frozen=True, slots=True)
class Timestamps:
    """The rule at one position of a text.

    is_first            no token precedes
    after_timestamp     the last token is a timestamp
    opens_text          the token before the last one is a timestamp too, or there is none
    latest              the last timestamp; None: there is none
    """

    rule: TimestampRule
    is_first: bool = True
    after_timestamp: bool = False
    opens_text: bool = True
    latest: int | None = None

    def after(self, token: int) -> Timestamps:
        """The constraint one token later."""
        is_timestamp = token >= self.rule.first
        return replace(
            self,
            is_first=False,
            after_timestamp=is_timestamp,
            opens_text=self.is_first or self.after_timestamp,
            latest=token if is_timestamp else self.latest,
        )

    def mask(self, logits: Tensor) -> None:
        """Set forbidden tokens to minus infinity in place [vocabulary]."""
        first = self.rule.first
        if self.is_first:
            logits[list(self.rule.suppressed_first)] = -torch.inf
        logits[[*self.rule.suppressed, first - 1]] = -torch.inf
        if self.after_timestamp and self.opens_text:
            logits[first:] = -torch.inf
        elif self.after_timestamp:
            logits[: self.rule.end_token] = -torch.inf
        if self.latest is not None:
            # A text may begin where the one before ends, but not end where it begins.
            begins_text = self.after_timestamp and not self.opens_text
            logits[first : self.latest if begins_text else self.latest + 1] = -torch.inf
        if self.is_first:
            self._require_timestamp(logits)
        logprobs = logits.float().log_softmax(-1)
        if logprobs[first:].logsumexp(-1) > logprobs[:first].max():
            logits[:first] = -torch.inf

    def _require_timestamp(self, logits: Tensor) -> None:
        logits[: self.rule.first] = -torch.inf
        if self.rule.max_initial is not None:
            logits[self.rule.first + self.rule.max_initial + 1 :] = -torch.inf
