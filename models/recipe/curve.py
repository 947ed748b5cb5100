"""The loss curves of both runs as one picture."""

from itertools import accumulate
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from models.recipe.trainer import Progress

SMOOTHING = 0.97


def plot(target: Progress, draft: Progress, file: Path) -> None:
    """Draw both curves over the tokens seen."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    _draw(left, target, "target: loss of answer tokens")
    _draw(right, draft, "draft: share of answer tokens that differ from the target's")
    figure.tight_layout()
    figure.savefig(file, dpi=100, metadata={"Software": None})
    plt.close(figure)


def _draw(axes: Axes, progress: Progress, title: str) -> None:
    millions = [progress.tokens * step / progress.step / 1e6 for step in range(1, progress.step + 1)]
    smooth = list(accumulate(progress.curve, lambda mean, loss: SMOOTHING * mean + (1 - SMOOTHING) * loss))
    axes.plot(millions, progress.curve, color="#d9c3c8", linewidth=0.5)
    axes.plot(millions, smooth, color="#7b1e3a")
    axes.set(title=title, xlabel="million tokens", yscale="log")
    axes.title.set_fontsize(9)
    axes.grid(visible=True, alpha=0.3)
