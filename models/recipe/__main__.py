"""The command line of the recipe: `python -m models.recipe all` makes everything from nothing.

Every stage reads what the one before left in the work folder, and the training stages resume.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from engine.load.resources import processor_count
from models.recipe import draft, target
from models.recipe import tokenizer as words
from models.recipe.answers import Model
from models.recipe.card import Run, write
from models.recipe.curve import plot
from models.recipe.evaluate import evaluate
from models.recipe.export import export
from models.recipe.network import parameters
from models.recipe.plan import DRAFT, MODELS, TARGET

WORK = Path("out/bundled")
# A file in the work folder that goes into the card: what was done by hand in this run.
NOTES = "notes.md"


def make_tokenizer(work: Path) -> None:
    """Train the tokenizer, unless the work folder has one: checkpoints speak its tokens."""
    if not (work / "tokenizer").exists():
        words.train().save_pretrained(work / "tokenizer")


def make_target(work: Path) -> None:
    """Train the target, or go on where its checkpoint is."""
    target.prepare(TARGET, work).run(target.objective)


def make_draft(work: Path) -> None:
    """Distil the draft from the target as it stands."""
    teacher = target.prepare(TARGET, work).averaged()
    draft.prepare(DRAFT, teacher, work).run(draft.distil(teacher))


def make_files(work: Path) -> None:
    """Write both models, as their checkpoints stand, into models/target and models/draft."""
    tokenizer = words.load(work / "tokenizer")
    teacher = target.prepare(TARGET, work).averaged()
    small = draft.prepare(DRAFT, teacher, work).averaged()
    export(DRAFT, small, tokenizer)
    export(TARGET, teacher, tokenizer)


def make_cards(work: Path) -> None:
    """Evaluate the files, write the cards and draw the curves."""
    first = target.prepare(TARGET, work)
    second = draft.prepare(DRAFT, first.averaged(), work)
    report = evaluate(Model(TARGET.folder), Model(DRAFT.folder))
    notes = work / NOTES
    write(
        report,
        Run.of(first.progress, parameters(first.model)),
        Run.of(second.progress, parameters(second.model)),
        notes.read_text(encoding="utf-8") if notes.exists() else "",
    )
    plot(first.progress, second.progress, MODELS / "loss.png")


STAGES: dict[str, Callable[[Path], None]] = {
    "tokenizer": make_tokenizer,
    "target": make_target,
    "draft": make_draft,
    "export": make_files,
    "evaluate": make_cards,
}


def main() -> None:
    """Run the named stage, or all of them in order."""
    parser = argparse.ArgumentParser(prog="python -m models.recipe", description="Make the bundled models.")
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--work", type=Path, default=WORK, help="folder of checkpoints (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=processor_count(), help="CPU threads (default: all)")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    for name, stage in STAGES.items():
        if chosen.stage in (name, "all"):
            stage(chosen.work)


if __name__ == "__main__":
    main()
