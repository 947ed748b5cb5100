"""The progress bars of transformers while weights are read, as reports to the listener of a load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils.logging import set_tqdm_hook

from engine.load.hub.reporting_bar import ReportingBar


class WeightBar(ReportingBar):
    """A bar over the weights of a model."""

    step = "weights"


@contextmanager
def reported_weights() -> Iterator[None]:
    """Within the block, bars of transformers are reports of the step "weights"."""

    def bar(_: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> WeightBar:
        return WeightBar(*args, **options)

    before = set_tqdm_hook(bar)
    try:
        yield
    finally:
        set_tqdm_hook(before)
