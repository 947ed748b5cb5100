"""Questions that a model answers with a label, as it reads them: up to where its answer begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.wording import names
from server.ability import SWITCHES
from server.labels import Fork

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer


def fork(tokenizer: Tokenizer, question: str, labels: Sequence[str]) -> Fork:
    """The tokens of a question and of the labels that may answer it; for a worker thread.

    A model that reasons is made to skip that: its first words are what is read.
    """
    if not tokenizer.has_chat_template:
        prompt = tuple(tokenizer.encode(f"{question}\nAnswer:"))
        return Fork(prompt, tuple(tuple(tokenizer.encode(f" {label}", add_special=False)) for label in labels))
    switches = {switch: False for switch in SWITCHES if switch in names(tokenizer.template)}
    asked = tokenizer.render_chat([{"role": "user", "content": question}], arguments=switches)
    skipped: tuple[int, ...] = ()
    thinking = tokenizer.dialect.thinking(0, asked.opened)
    if thinking is not None:
        skipped = (*(() if thinking.opens is None else (thinking.opens,)), *thinking.closes)
    answers = tuple(tuple(tokenizer.encode(label, add_special=False)) for label in labels)
    return Fork((*asked.tokens, *skipped), answers)
