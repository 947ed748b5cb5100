"""Questions that a model answers with a label, as it reads them: up to where its answer begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field as initial
from typing import TYPE_CHECKING

from engine.errors import ContextTooLong
from engine.text.wording import undeclared_variables
from server.generation.support import REASONING_SWITCHES
from server.http.errors import invalid_value
from server.scoring.labels import LabelScorer, Path

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

LabelledQuestion = tuple[str, Sequence[str]]


# Tokens of all prompts of one body, of which each repeats what it has in common with the others.
MAX_QUESTION_TOKENS = 2**20


@dataclass(slots=True)
class QuestionEncoder:
    """Puts questions to one model. Its methods belong to worker threads.

    context  tokens that a prompt may have
    field    the list of the body that prompts are made of
    """

    tokenizer: Tokenizer
    context: int
    field: str
    _read: int = 0
    _labels: dict[str, Path] = initial(default_factory=dict)

    def label_scorer(self, question: str, labels: Sequence[str]) -> LabelScorer:
        """The tokens of a question and of the labels that may answer it."""
        return LabelScorer(self._prompt(question), tuple(self._label(label) for label in labels))

    def label_scorers(self, frame: str, text: str, asked: Sequence[LabelledQuestion]) -> list[LabelScorer]:
        """Many questions about one text, which `frame` has a place for. A long text is cut into tokens once."""
        prompts = self._prompts(frame, text, [question for question, _ in asked])
        pairs = zip(prompts, asked, strict=True)
        return [LabelScorer(prompt, tuple(self._label(label) for label in labels)) for prompt, (_, labels) in pairs]

    def _prompts(self, frame: str, text: str, questions: Sequence[str]) -> list[Path]:
        """What each question is about, and the question.

        Behind the text all of it is read as behind a short one: what differs for the first question is put before the
        others. Where that does not hold, they are read as they are.
        """
        about, short = frame.format(text), frame.format("x")
        first, likewise = self._prompt(about + questions[0]), self._prompt(short + questions[0])
        shared = _common_end(first, likewise)
        own, others = first[: len(first) - shared], likewise[: len(likewise) - shared]
        found = [first]
        for question in questions[1:]:
            tokens = self._prompt(short + question)
            alike = tokens[: len(others)] == others
            found.append(own + tokens[len(others) :] if alike else self._prompt(about + question))
        return found

    def _prompt(self, question: str) -> Path:
        """The tokens of a question; an error for too many of them, before others are read."""
        tokens = self._tokens(question)
        if len(tokens) >= self.context:
            raise ContextTooLong(len(tokens), self.context)
        self._read += len(tokens)
        if self._read > MAX_QUESTION_TOKENS:
            raise invalid_value(self.field, f"the prompts that it makes have more than {MAX_QUESTION_TOKENS} tokens")
        return tokens

    def _tokens(self, question: str) -> Path:
        """A model that reasons is made to skip that: its first words are what is read."""
        if not self.tokenizer.has_chat_template:
            return tuple(self.tokenizer.encode(f"{question}\nAnswer:"))
        switches = {
            switch: False for switch in REASONING_SWITCHES if switch in undeclared_variables(self.tokenizer.template)
        }
        asked = self.tokenizer.render_chat([{"role": "user", "content": question}], arguments=switches)
        thinking = self.tokenizer.chat_format.reasoning_limit(0, asked.generation_prompt)
        if thinking is None:
            return asked.tokens
        opening = () if thinking.start_token is None else (thinking.start_token,)
        return (*asked.tokens, *opening, *thinking.end_tokens)

    def _label(self, label: str) -> Path:
        if label not in self._labels:
            # Behind a colon comes a space, which is part of most tokens that words begin with.
            text = label if self.tokenizer.has_chat_template else f" {label}"
            self._labels[label] = tuple(self.tokenizer.encode(text, add_special=False))
        return self._labels[label]


def _common_end(left: Path, right: Path) -> int:
    """How many tokens both end with."""
    pairs = zip(reversed(left), reversed(right), strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))
