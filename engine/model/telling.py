"""What draws the next tokens behind the rows of a forward, however their logits are computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from engine.model.sight import Sight
from engine.sample.sampler import Draw, emit
from kvcache.forward import Forward


class Teller(ABC):
    """A model over the shared cache, of which tokens are asked rather than logits."""

    @abstractmethod
    def run(
        self, forward: Forward, tokens: Sequence[int], wanted: Sequence[int], sights: Sequence[Sight | None] = ()
    ) -> Tensor:
        """Logits [wanted, vocabulary] after an open forward's rows, see Runner."""

    def choose(self, logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
        """The next token of each row of logits [draws, vocabulary], by the rule `emit`."""
        return emit(logits, draws)

    def tell(
        self,
        forward: Forward,
        tokens: Sequence[int],
        wanted: Sequence[int],
        sights: Sequence[Sight | None],
        draws: Sequence[Draw],
    ) -> list[int | None]:
        """The next token behind each wanted row: `choose` after `run`, where nobody asks for the logits."""
        return self.choose(self.run(forward, tokens, wanted, sights), draws)
