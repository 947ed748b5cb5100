"""Decisions: questions about an input, answered by the log-probabilities of labelled options; nothing is sampled.

Each question is a prompt, and all prompts begin with the input, which is computed once. Each option has a label in the
prompt, so options may be any text; labels.py computes the probability of each label.
"""

from __future__ import annotations

import functools
import itertools
import json
import string
from collections.abc import Sequence
from dataclasses import dataclass

import anyio.to_thread

from server.generation.batch import PromptResult
from server.http.errors import UNKNOWN_PARAMETER, ApiError, invalid_value, missing_parameter
from server.schemas.decisions import (
    ChoiceAnswer,
    ChoiceQuestion,
    Decision,
    DecisionCallItem,
    DecisionCallOutputItem,
    DecisionMessageItem,
    DecisionRefusalPart,
    DecisionRequest,
    DecisionUsage,
    Item,
    JsonPart,
    Part,
    Predicate,
    PredicateAnswer,
    Question,
    ScoreAnswer,
    ScoreQuestion,
)
from server.scoring.labels import LabelScorer, LabelScores, rounded_probability, score_labels
from server.scoring.questions import QuestionEncoder
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
    """The answers to a body; raises ApiError or EngineError."""
    service.check_ready()
    scores, results = await score_labels(service, functools.partial(_scorers, service, body), id, "decisions")
    answers = await anyio.to_thread.run_sync(_answers, body.questions, scores)
    return Decision(answers=answers, model=service.name, usage=_usage(results))


def _answers(
    questions: Sequence[Question], scores: Sequence[LabelScores]
) -> list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]:
    """For a worker thread: there may be 100,000 options."""
    return [_answer(question, score) for question, score in zip(questions, scores, strict=True)]


def _scorers(service: Service, body: DecisionRequest) -> list[LabelScorer]:
    questions = [(_question_text(question), _labels(question)) for question in body.questions]
    encoder = QuestionEncoder(service.engine.tokenizer, service.engine.info.context, "questions")
    return encoder.label_scorers(_PROMPT_TEMPLATE, transcript(body.input), questions)


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
        # A digit is the position of its level.
        names: Sequence[str] = string.digits if len(texts) <= len(string.digits) else _letters(len(texts))
    else:
        texts = [_described(_plain(choice.value), choice.description) for choice in question.choices]
        names = _letters(len(texts))
    return [_LabelledOption(name, text) for name, text in zip(names, texts, strict=False)]


def _letters(count: int) -> Sequence[str]:
    """Labels of equal length, so that none is a prefix of another."""
    letters = string.ascii_uppercase
    return letters if count <= len(letters) else ["".join(pair) for pair in itertools.product(letters, repeat=2)]


def _described(text: str, description: str | None) -> str:
    return f"{text} - {description}" if description else text


def _plain(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _answer(question: Question, scores: LabelScores) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    probabilities = scores.probabilities
    match question:
        case Predicate():
            return PredicateAnswer(type="predicate", name=question.name, probability=probabilities[0])
        case ChoiceQuestion():
            return ChoiceAnswer(
                type="choice",
                name=question.name,
                choice=question.choices[scores.best].value,
                confidence=scores.confidence,
                probabilities=[
                    {"value": choice.value, "probability": share}
                    for choice, share in zip(question.choices, probabilities, strict=True)
                ],
            )
        case ScoreQuestion():
            return ScoreAnswer(
                type="score",
                name=question.name,
                score=rounded_probability(sum(value * share for value, share in enumerate(probabilities))),
                confidence=scores.confidence,
                probabilities=[
                    {"label": level.label, "probability": share, "value": value}
                    for value, (level, share) in enumerate(zip(question.levels, probabilities, strict=True))
                ],
            )


def _usage(results: Sequence[PromptResult]) -> DecisionUsage:
    costs = [result.finished.usage for result in results]
    prompt, cached = sum(cost.prompt_tokens for cost in costs), sum(cost.cached_tokens for cost in costs)
    completion = sum(cost.completion_tokens for cost in costs)
    return DecisionUsage(
        input_tokens=prompt,
        input_tokens_details={"cached_tokens": cached, "cache_write_tokens": prompt - cached},
        output_tokens=completion,
        output_tokens_details={"reasoning_tokens": 0},
        total_tokens=prompt + completion,
    )


def transcript(input: str | Sequence[Item]) -> str:
    """The text for the prompts; ApiError for a tool result without a call."""
    if isinstance(input, str):
        return input
    called: dict[str, str] = {}
    lines = []
    for index, item in enumerate(input):
        match item:
            case DecisionMessageItem():
                lines.append(f"[{item.role}]\n{text_of(item.content)}")
            case DecisionCallItem():
                called[item.call_id] = item.name
                lines.append(f"[call of {item.name}]\n{_arguments(item, index)}")
            case DecisionCallOutputItem():
                lines.append(f"[answer of {_tool_name(called, item.call_id, index)}]\n{text_of(item.output)}")
    return "\n\n".join(lines)


def text_of(content: str | Sequence[Part]) -> str:
    """The text of a content, with its parts joined."""
    return content if isinstance(content, str) else "\n".join(_written(part) for part in content)


def _written(part: Part) -> str:
    if isinstance(part, JsonPart):
        return json.dumps(part.data, ensure_ascii=False, separators=(",", ":"))
    return part.refusal if isinstance(part, DecisionRefusalPart) else part.text


def _arguments(item: DecisionCallItem, index: int) -> str:
    """Arguments or input of a call, by its type."""
    expected, other = ("arguments", "input") if item.type == "function_call" else ("input", "arguments")
    value, extra = getattr(item, expected), getattr(item, other)
    if value is None or extra is not None:
        place = f"input[{index}].{expected if value is None else other}"
        if value is None:
            raise missing_parameter(place)
        raise ApiError(UNKNOWN_PARAMETER, f"Unknown parameter: '{place}'.", param=place)
    return str(value)


def _tool_name(called: dict[str, str], call_id: str, index: int) -> str:
    if call_id not in called:
        place = f"input[{index}].call_id"
        raise invalid_value(place, "no call before it has this id")
    return called[call_id]
