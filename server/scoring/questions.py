"""Tokenizes questions with labelled answers, up to the position where the model's answer begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field as initial
from typing import TYPE_CHECKING

from engine.errors import ContextTooLong
from server.generation.reasoning import REASONING_SWITCHES
from server.http.errors import invalid_value
from server.scoring.labels import LabelScorer, Path

if TYPE_CHECKING:
    from engine.client import TokenizerClient

LabelledQuestion = tuple[str, Sequence[str]]


# Limit of the tokens of all prompts of a body; each repeats the prefix that it shares with the others.
MAX_QUESTION_TOKENS = 2**20


@dataclass(slots=True)
class QuestionEncoder:
    """Encodes questions for one model. Methods run in worker threads.

    context  maximum tokens of a prompt
    field    field of the body that the prompts are built from
    """

    tokenizer: TokenizerClient
    context: int
    field: str
    _read: int = 0
    _labels: dict[str, Path] = initial(default_factory=dict)

    def label_scorer(self, question: str, labels: Sequence[str]) -> LabelScorer:
        """The tokens of a question and of its labels."""
        return LabelScorer(self._prompt(question), tuple(self._label(label) for label in labels))

    def label_scorers(self, template: str, text: str, questions: Sequence[LabelledQuestion]) -> list[LabelScorer]:
        """Many questions about one text, which is inserted into `template`. A long text is tokenized once."""
        prompts = self._prompts(template, text, [question for question, _ in questions])
        pairs = zip(prompts, questions, strict=True)
        return [LabelScorer(prompt, tuple(self._label(label) for label in labels)) for prompt, (_, labels) in pairs]

    def _prompts(self, template: str, text: str, questions: Sequence[str]) -> list[Path]:
        """Tokens of the text with each question.

        Questions are tokenized after a short text, and its tokens are replaced by the tokens of the actual text. If
        the tokens before the question differ, the complete prompt is tokenized.
        """
        text_prompt, short_prompt = template.format(text), template.format("x")
        first, short_first = self._prompt(text_prompt + questions[0]), self._prompt(short_prompt + questions[0])
        shared = _common_end(first, short_first)
        text_tokens, short_tokens = first[: len(first) - shared], short_first[: len(short_first) - shared]
        prompts = [first]
        for question in questions[1:]:
            tokens = self._prompt(short_prompt + question)
            has_same_start = tokens[: len(short_tokens)] == short_tokens
            question_tokens = tokens[len(short_tokens) :]
            prompts.append(text_tokens + question_tokens if has_same_start else self._prompt(text_prompt + question))
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
        switches = {switch: False for switch in REASONING_SWITCHES if switch in self.tokenizer.template_names}
        prompt = self.tokenizer.render_chat([{"role": "user", "content": question}], arguments=switches)
        limit = self.tokenizer.chat_format.reasoning_limit(0, prompt.generation_prompt)
        if limit is None:
            return prompt.tokens
        opening = () if limit.start_token is None else (limit.start_token,)
        return (*prompt.tokens, *opening, *limit.end_tokens)

    def _label(self, label: str) -> Path:
        if label not in self._labels:
            # A space follows the colon, and is part of most tokens at the start of a word.
            text = label if self.tokenizer.has_chat_template else f" {label}"
            self._labels[label] = tuple(self.tokenizer.encode(text, add_special=False))
        return self._labels[label]


def _common_end(left: Path, right: Path) -> int:
    """Number of common tokens at the end."""
    pairs = zip(reversed(left), reversed(right), strict=False)
    return next(
        (length for length, (token, other_token) in enumerate(pairs) if token != other_token),
        min(len(left), len(right)),
    )
