"""Tokenizes questions with labelled answers, up to the position where the model's answer begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field as initial
from typing import TYPE_CHECKING

from engine.errors import ContextTooLong
from engine.text.variables import undeclared_variables
from server.generation.support import REASONING_SWITCHES
from server.http.errors import invalid_value
from server.scoring.labels import LabelScorer, Path

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

LabelledQuestion = tuple[str, Sequence[str]]


# Limit of the tokens of all prompts of a body; each repeats the prefix that it shares with the others.
MAX_QUESTION_TOKENS = 2**20


@dataclass(slots=True)
class QuestionEncoder:
    """Encodes questions for one model. Methods run in worker threads.

    context  maximum tokens of a prompt
    field    field of the body that the prompts are built from
    """

    tokenizer: Tokenizer
    context: int
    field: str
    _read: int = 0
    _labels: dict[str, Path] = initial(default_factory=dict)

    def label_scorer(self, question: str, labels: Sequence[str]) -> LabelScorer:
        """The tokens of a question and of its labels."""
        return LabelScorer(self._prompt(question), tuple(self._label(label) for label in labels))

    def label_scorers(self, frame: str, text: str, asked: Sequence[LabelledQuestion]) -> list[LabelScorer]:
        """Many questions about one text, which is inserted into `frame`. A long text is tokenized once."""
        prompts = self._prompts(frame, text, [question for question, _ in asked])
        pairs = zip(prompts, asked, strict=True)
        return [LabelScorer(prompt, tuple(self._label(label) for label in labels)) for prompt, (_, labels) in pairs]

    def _prompts(self, frame: str, text: str, questions: Sequence[str]) -> list[Path]:
        """Tokens of the text with each question.

        Questions are tokenized behind a short text, whose tokens are then replaced by those of the actual text. If the
        tokens before the question differ, the complete prompt is tokenized.
        """
        about, short = frame.format(text), frame.format("x")
        first, likewise = self._prompt(about + questions[0]), self._prompt(short + questions[0])
        shared = _common_end(first, likewise)
        own, others = first[: len(first) - shared], likewise[: len(likewise) - shared]
        prompts = [first]
        for question in questions[1:]:
            tokens = self._prompt(short + question)
            alike = tokens[: len(others)] == others
            prompts.append(own + tokens[len(others) :] if alike else self._prompt(about + question))
        return prompts

    def _prompt(self, question: str) -> Path:
        """Tokens of a question; raises before further questions are tokenized if there are too many."""
        tokens = self._tokens(question)
        if len(tokens) >= self.context:
            raise ContextTooLong(len(tokens), self.context)
        self._read += len(tokens)
        if self._read > MAX_QUESTION_TOKENS:
            raise invalid_value(self.field, f"its prompts have more than {MAX_QUESTION_TOKENS} tokens")
        return tokens

    def _tokens(self, question: str) -> Path:
        """The tokens; models that reason are made to skip it, since the first token of the answer is scored."""
        if not self.tokenizer.has_chat_template:
            return tuple(self.tokenizer.encode(f"{question}\nAnswer:"))
        switches = {
            switch: False for switch in REASONING_SWITCHES if switch in undeclared_variables(self.tokenizer.template)
        }
        asked = self.tokenizer.render_chat([{"role": "user", "content": question}], arguments=switches)
        limit = self.tokenizer.chat_format.reasoning_limit(0, asked.generation_prompt)
        if limit is None:
            return asked.tokens
        opening = () if limit.start_token is None else (limit.start_token,)
        return (*asked.tokens, *opening, *limit.end_tokens)

    def _label(self, label: str) -> Path:
        if label not in self._labels:
            # A space follows the colon, and is part of most tokens at the start of a word.
            text = label if self.tokenizer.has_chat_template else f" {label}"
            self._labels[label] = tuple(self.tokenizer.encode(text, add_special=False))
        return self._labels[label]


def _common_end(left: Path, right: Path) -> int:
    """Number of common tokens at the end."""
    pairs = zip(reversed(left), reversed(right), strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))
