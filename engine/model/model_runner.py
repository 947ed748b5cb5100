"""What draws the next tokens behind the rows of a forward, however their logits are computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from engine.model.encoder_mask import EncoderMask
from engine.sample.sampler import SamplingContext, sample_tokens
from kvcache.forward import Forward


class ModelRunner(ABC):
    """A model over the shared cache, of which tokens are asked rather than logits."""

    @abstractmethod
    def run(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None] = (),
    ) -> Tensor:
        """Logits [wanted, vocabulary] after an open forward's rows, see Runner."""

    def sample(self, logits: Tensor, draws: Sequence[SamplingContext]) -> list[int | None]:
        """The next token of each row of logits [draws, vocabulary], by the rule `emit`."""
        return sample_tokens(logits, draws)

    def run_and_sample(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None],
        draws: Sequence[SamplingContext],
    ) -> list[int | None]:
        """The next token behind each wanted row: `sample` after `run`, where nobody asks for the logits."""
        return self.sample(self.run(forward, tokens, logit_rows, encoder_masks), draws)
