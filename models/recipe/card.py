"""The model cards, written from the evaluation and the training record so that no number is typed."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from models.recipe.evaluate import Report, Score
from models.recipe.plan import DRAFT, LONGEST_ROW, MODELS, POSITIONS, TARGET, Plan
from models.recipe.trainer import Progress

RESULTS = MODELS / "evaluation.json"
LAST_STEPS = 100
HEAD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
"""
TARGET_TEXT = """# Cellar's bundled target

A tiny Llama trained from scratch so that `cellar serve` answers at once, offline, on any machine. It talks about
Cellar, does small tasks (sums, repeating, lists, JSON, recall, tool calls, a short story) and says that it is too
small for the rest. It is a demonstration and a test bed, not a source of facts.

{shape}

## Training

{training}
The curve is in `../loss.png`.

The data is written by a program, `models/recipe/dialogues`, from fixed seeds: no person's text, no other model's
output, no third-party data set. About 200 kB of the Python documentation in the standard library (PSF licence) was
read for the tokenizer's vocabulary alone. One conversation is one row; the loss counts the assistant's words in
full and the rest at a tenth. The first rows are in good part random tokens to copy, which teaches the model to look
back; the printed loss counts them too.
The weights are the running average of the last few hundred steps, stored as bfloat16.
{notes}
## Evaluation

Temperature 0, through the chat template, on conversations of held-out seeds. An answer is right when it equals the
wanted one word for word; a list when it has the wanted number of different things of the kind; a story when it has
four or five sentences about the animal asked for. Held-out seeds draw from the same templates as the training
rows, so these numbers say how well the model does what it was taught. The `hand-written` row holds questions that
no template writes and says how far that carries; a right answer there contains a given phrase.

{table}

## Limits

* It knows what its recipe names and nothing else. Off its topics it may refuse, or answer a question nobody asked.
* Where a row of the table is far from 100 %, the model is unreliable at it. Sums, copying of unusual words and
  extraction come out wrong first; words that it half remembers come out as words that it knows.
* It speaks a little English and no other language.
* Text longer than {longest} tokens was never seen in training, though the configuration allows {positions}.
* What it says about Cellar is of the version it was trained with. The documentation is right where they differ.

## Remake

`make train`, or `python -m models.recipe all`, on a CPU. The same seed, library versions and processor give the same
run; another processor rounds otherwise and gives weights that differ and behave alike.
"""
DRAFT_TEXT = """# Cellar's bundled draft

The small partner of `../target` for speculative decoding. It shares the target's tokenizer and is no use alone.

{shape}

## Training

{training}
The curve is in `../loss.png`. It learns the target's whole distribution (Kullback-Leibler divergence) over the
assistant's words of the same generated dialogues, and starts from the main directions of the target's embedding.

## Agreement

Share of the target's greedy answer tokens that the draft likes best too, given the same text before: **{share}**.
With four guesses a round the target keeps {accepted:.2f} of them on average and gives {a_pass:.2f} tokens a pass.

{table}

## Remake

`make train`, or `python -m models.recipe all`, which trains the target first.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """What the card says of a training run."""

    parameters: int
    steps: int
    tokens: int
    minutes: float
    final: float

    @classmethod
    def of(cls, progress: Progress, parameters: int) -> "Run":
        """The record of a finished run."""
        last = progress.curve[-LAST_STEPS:]
        return cls(parameters, progress.step, progress.tokens, progress.seconds / 60, sum(last) / len(last))


def write(report: Report, target: Run, draft: Run, notes: str) -> None:
    """Write both cards and the numbers behind them; `notes` tell what the recipe cannot know of this run."""
    record = {"target": asdict(target), "draft": asdict(draft), **asdict(report)}
    RESULTS.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    _save(TARGET.folder, TARGET_TEXT.format(
        shape=_shape(TARGET, target),
        training=f"{_budget(target)} The loss of answer tokens at the end is {target.final:.3f}.",
        notes=f"\n{notes.strip()}\n" if notes else "",
        table=_scores(report.scores),
        longest=LONGEST_ROW,
        positions=POSITIONS,
    ))  # fmt: skip
    _save(DRAFT.folder, DRAFT_TEXT.format(
        shape=_shape(DRAFT, draft),
        training=_budget(draft),
        share=_percent(report.agreement.share),
        accepted=report.agreement.accepted,
        a_pass=report.agreement.a_pass,
        table=_shares(report.agreement_by_topic),
    ))  # fmt: skip


def _save(folder: Path, text: str) -> None:
    (folder / "README.md").write_text(HEAD + text, encoding="utf-8")


def _shape(plan: Plan, run: Run) -> str:
    shape = plan.shape
    return (
        f"`LlamaForCausalLM`, {run.parameters / 1e6:.2f} M parameters: {shape.layers} layers, hidden {shape.hidden}, "
        f"feed-forward {shape.inner},\n{shape.heads} heads over {shape.key_heads} key heads, tied embeddings. Licence: "
        "Apache-2.0, like the project."
    )


def _budget(run: Run) -> str:
    return (
        f"{run.steps} steps, {run.tokens / 1e6:.1f} M tokens, about {run.minutes:.0f} minutes on two shared CPU cores "
        "(bfloat16\nautocast, Muon for the matrices and AdamW for the rest)."
    )


def _scores(scores: dict[str, Score]) -> str:
    lines = ["| topic | right | asked | share |", "| --- | ---: | ---: | ---: |"]
    for topic, score in scores.items():
        lines.append(f"| {topic} | {score.right} | {score.asked} | {_percent(score.right / score.asked)} |")
    return "\n".join(lines)


def _shares(shares: dict[str, float]) -> str:
    lines = ["| topic | agreement |", "| --- | ---: |"]
    lines += [f"| {topic} | {_percent(share)} |" for topic, share in shares.items()]
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
