"""Questions about an input, answered by how likely the model finds each answer: nothing is sampled.

Every question is a prompt of its own, and all of them begin with the input, which is computed once. An answer is a
label that the prompt gives to each option, so options may be any text; labels.py reads how likely each is.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from dataclasses import dataclass

import anyio.to_thread

from engine.types.request import Request
from server.generation.batch import PromptResult, run_all
from server.schemas.decisions import (
    ChoiceAnswer,
    ChoiceQuestion,
    Decision,
    DecisionRequest,
    DecisionUsage,
    Predicate,
    PredicateAnswer,
    Question,
    ScoreAnswer,
    ScoreQuestion,
)
from server.scoring.labels import LabelScorer, LabelScores, rounded_probability
from server.scoring.questions import QuestionEncoder
from server.scoring.transcript import text_of, transcript
from server.service import Service

_PROMPT_TEMPLATE = "Read the input, then answer the question about it.\n\n<input>\n{}\n</input>\n\n"
_TRUTH = ("yes", "no")
_ASK_TRUTH = "Is this true? Answer with yes or no only."
_ASK_OPTION = "Answer with the {} of one option only."


@dataclass(frozen=True, slots=True)
class _LabelledOption:
    label: str
    text: str

    @property
    def line(self) -> str:
        return f"{self.label}: {self.text}"


async def decide(service: Service, body: DecisionRequest, id: str) -> Decision:
    """The answers to a body; raises ApiError or EngineError for what is wrong with it."""
    model = service.resolve(body.model)
    service.check_ready()
    forks, asked = await anyio.to_thread.run_sync(_asked, service, body, id)
    outcomes = await run_all(service, [request for requests in asked for request in requests], "decisions")
    answers = await anyio.to_thread.run_sync(_answers, body.questions, forks, asked, outcomes)
    return Decision(answers=answers, model=model, usage=_usage(outcomes))


def _asked(service: Service, body: DecisionRequest, id: str) -> tuple[list[LabelScorer], list[tuple[Request, ...]]]:
    """The questions as the model reads them, and what has to be run for each; for a worker thread."""
    forks = _scorers(service, body)
    return forks, [tuple(fork.requests(f"{id}-{at}")) for at, fork in enumerate(forks)]


def _answers(
    questions: Sequence[Question],
    forks: Sequence[LabelScorer],
    asked: Sequence[tuple[Request, ...]],
    outcomes: Sequence[PromptResult],
) -> list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]:
    """For a worker thread: there may be 100,000 options."""
    told = iter(outcomes)
    readings = [
        fork.scores(list(itertools.islice(told, len(requests)))) for fork, requests in zip(forks, asked, strict=True)
    ]
    return [_answer(question, reading) for question, reading in zip(questions, readings, strict=True)]


def _scorers(service: Service, body: DecisionRequest) -> list[LabelScorer]:
    """The questions as the model reads them."""
    asked = [(_question_text(question), _labels(question)) for question in body.questions]
    asker = QuestionEncoder(service.engine.tokenizer, service.engine.info.context, "questions")
    return asker.label_scorers(_PROMPT_TEMPLATE, transcript(body.input), asked)


def _question_text(question: Question) -> str:
    instructions = text_of(question.instructions)
    if isinstance(question, Predicate):
        return f"Statement: {instructions}\n{_ASK_TRUTH}"
    options = _options(question)
    kind = "number" if options[0].label.isdigit() else "letter" if len(options[0].label) == 1 else "letters"
    return "\n".join((f"Question: {instructions}", *(option.line for option in options), _ASK_OPTION.format(kind)))


def _labels(question: Question) -> Sequence[str]:
    return _TRUTH if isinstance(question, Predicate) else [option.label for option in _options(question)]


def _options(question: ChoiceQuestion | ScoreQuestion) -> list[_LabelledOption]:
    if isinstance(question, ScoreQuestion):
        texts = [_described(level.label, level.description) for level in question.levels]
        # The number of a level says where it stands.
        names: Sequence[str] = string.digits if len(texts) <= len(string.digits) else _letters(len(texts))
    else:
        texts = [_described(_plain(choice.value), choice.description) for choice in question.choices]
        names = _letters(len(texts))
    return [_LabelledOption(name, text) for name, text in zip(names, texts, strict=False)]


def _letters(count: int) -> Sequence[str]:
    """Labels of one length, so that none is the beginning of another."""
    letters = string.ascii_uppercase
    return letters if count <= len(letters) else ["".join(pair) for pair in itertools.product(letters, repeat=2)]


def _described(text: str, description: str | None) -> str:
    return f"{text} - {description}" if description else text


def _plain(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _answer(question: Question, reading: LabelScores) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    shares = reading.shares
    match question:
        case Predicate():
            return PredicateAnswer(type="predicate", name=question.name, probability=shares[0])
        case ChoiceQuestion():
            return ChoiceAnswer(
                type="choice",
                name=question.name,
                choice=question.choices[reading.best].value,
                confidence=reading.confidence,
                probabilities=[
                    {"value": choice.value, "probability": share}
                    for choice, share in zip(question.choices, shares, strict=True)
                ],
            )
        case ScoreQuestion():
            return ScoreAnswer(
                type="score",
                name=question.name,
                score=rounded_probability(sum(value * share for value, share in enumerate(shares))),
                confidence=reading.confidence,
                probabilities=[
                    {"label": level.label, "probability": share, "value": value}
                    for value, (level, share) in enumerate(zip(question.levels, shares, strict=True))
                ],
            )


def _usage(outcomes: Sequence[PromptResult]) -> DecisionUsage:
    costs = [outcome.finished.usage for outcome in outcomes]
    prompt, cached = sum(cost.prompt_tokens for cost in costs), sum(cost.cached_tokens for cost in costs)
    said = sum(cost.completion_tokens for cost in costs)
    return DecisionUsage(
        input_tokens=prompt,
        input_tokens_details={"cached_tokens": cached, "cache_write_tokens": prompt - cached},
        output_tokens=said,
        output_tokens_details={"reasoning_tokens": 0},
        total_tokens=prompt + said,
    )
