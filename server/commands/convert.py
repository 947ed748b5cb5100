"""`cellar convert` on the console: phases, a progress bar on a terminal, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

EXIT_IMPOSSIBLE = 1


def run_conversion(
    source: str,
    target: Path,
    *,
    weights: Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q4_k_m"] | None,
    pre_tokenizer: str | None,
    force: bool,
) -> int:
    """Convert a model; returns the exit code."""
    # transformers' import takes seconds.
    from engine.convert.convert import Conversion, convert
    from engine.errors import ModelError
    from engine.types.progress import Progress as Step
    from engine.types.progress import progress_to

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(highlight=False, soft_wrap=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("resolve", total=None)
        conversion = Conversion(
            source=source,
            target=target,
            weight_type=weights,
            pre_tokenizer=pre_tokenizer,
            overwrite=force,
            on_phase=lambda phase: progress.update(task, description=phase),
            on_progress=lambda written, total: progress.update(task, completed=written, total=total),
        )

        def show(step: Step) -> None:
            progress.update(task, description=step.step, completed=step.done, total=step.total or None)

        try:
            with progress_to(show):
                unread = convert(conversion)
        except ModelError as error:
            progress.stop()
            console.print(f"cellar: {error}", markup=False)
            return EXIT_IMPOSSIBLE
    if unread:
        console.print(f"text only: its {', '.join(unread)} parts are left out", markup=False)
    files = target.iterdir() if target.is_dir() else [target]
    console.print(f"{target}: {sum(file.stat().st_size for file in files) / 2**20:,.0f} MiB", markup=False)
    return 0
