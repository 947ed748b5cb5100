"""POST /v1/decisions: questions about an input, and the response."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from server.schemas.chat import CacheOptions
from server.schemas.common import Label
from server.schemas.content import Breakpoint, Object, Strict
from server.schemas.response_input import MAX_ITEMS, kind_of

# OpenAI's limits.
MAX_QUESTIONS, MAX_CHOICES = 400, 255

CallId = Annotated[str, Field(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class DecisionTextPart(Strict):
    """A text part of any author. Breakpoints have no effect: the prefix cache is exact to the token."""

    type: Literal["input_text", "output_text"]
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


class DecisionRefusalPart(Strict):
    """A refusal of a model."""

    type: Literal["refusal"]
    refusal: str


class JsonPart(Strict):
    """Data, rendered as compact JSON."""

    type: Literal["input_json"]
    data: Object | Annotated[list[Object], Field(max_length=MAX_ITEMS)]


def _part(part: object) -> str:
    kind = kind_of(part)
    return {"refusal": "refusal", "input_json": "json", "input_image": "image"}.get(str(kind), "text")


Part = Annotated[
    Annotated[DecisionTextPart, Tag("text")]
    | Annotated[DecisionRefusalPart, Tag("refusal")]
    | Annotated[JsonPart, Tag("json")],
    Discriminator(
        _part,
        custom_error_type="unsupported_value",
        custom_error_message="this server reads text only, no images",
    ),
]


def _shape(content: object) -> str:
    return "parts" if isinstance(content, list) else "string"


Text = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[Part], Field(max_length=MAX_ITEMS), Tag("parts")],
    Discriminator(_shape),
]


class DecisionMessageItem(Strict):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["user", "developer", "system", "assistant"]
    content: Text
    phase: Literal["commentary", "final_answer"] | None = None


class DecisionCallItem(Strict):
    """A tool call: arguments as JSON text for a function, input text for a custom tool."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: CallId
    name: Label
    arguments: str | None = None
    input: str | None = None
    namespace: Label | None = None
    id: Label | None = None
    status: Status | None = None


class DecisionCallOutputItem(Strict):
    """The result of the tool call with this id."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: Text
    id: Label | None = None
    status: Status | None = None


def _item(item: object) -> str:
    kind = str(kind_of(item) or "message")
    return "output" if kind.endswith("_output") else "call" if kind.endswith("_call") else "message"


Item = Annotated[
    Annotated[DecisionMessageItem, Tag("message")]
    | Annotated[DecisionCallItem, Tag("call")]
    | Annotated[DecisionCallOutputItem, Tag("output")],
    Discriminator(_item),
]
Input = Annotated[
    Annotated[str, Field(min_length=1), Tag("string")]
    | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS), Tag("parts")],
    Discriminator(_shape),
]


class _QuestionFields(Strict):
    name: Label | None = None
    instructions: Text


class Predicate(_QuestionFields):
    """A statement about the input; the answer is its probability."""

    type: Literal["predicate"]


class ChoiceOption(Strict):
    """An option. A string and a boolean of the same text are two values."""

    value: str | bool
    description: str | None = None


def _distinct(choices: list[ChoiceOption]) -> list[ChoiceOption]:
    if len({(type(choice.value), choice.value) for choice in choices}) < len(choices):
        raise PydanticCustomError("invalid_value", "each value may be there once")
    return choices


class ChoiceQuestion(_QuestionFields):
    """A question with unordered options."""

    type: Literal["choice"]
    choices: Annotated[list[ChoiceOption], Field(min_length=2, max_length=MAX_CHOICES), AfterValidator(_distinct)]


class ScoreLevel(Strict):
    """A level of a scale."""

    label: str
    description: str | None = None


class ScoreQuestion(_QuestionFields):
    """A question with a scale of ordered levels."""

    type: Literal["score"]
    levels: Annotated[list[ScoreLevel], Field(min_length=2, max_length=MAX_CHOICES)]


Question = Annotated[Predicate | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]


class DecisionRequest(Strict):
    """Independent questions about one input."""

    model: str | None = None
    input: Input
    questions: Annotated[list[Question], Field(min_length=1, max_length=MAX_QUESTIONS)]
    prompt_cache_key: Label | None = None
    prompt_cache_options: CacheOptions | None = None
    safety_identifier: Label | None = None


class PredicateAnswer(TypedDict):
    """Probability of true, normalised over true and false."""

    type: Literal["predicate"]
    name: str | None
    probability: float


class ChoiceProbability(TypedDict):
    """Probability of an option, normalised over all options."""

    value: str | bool
    probability: float


class ChoiceAnswer(TypedDict):
    """The likeliest option; `confidence` is its probability among all continuations."""

    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class ScoreProbability(TypedDict):
    """Probability of a level, normalised over all levels; `value` counts levels from 0."""

    label: str
    probability: float
    value: int


class ScoreAnswer(TypedDict):
    """The expected level, counted from 0; `confidence`: probability of the likeliest level among all continuations."""

    type: Literal["score"]
    name: str | None
    score: float
    confidence: float
    probabilities: list[ScoreProbability]


class DecisionInputDetails(TypedDict):
    """Input tokens that were found in the cache, and input tokens that were computed and cached."""

    cached_tokens: int
    cache_write_tokens: int


class DecisionOutputDetails(TypedDict):
    """Output tokens by kind; decisions have no reasoning."""

    reasoning_tokens: int


class DecisionUsage(TypedDict):
    """Token usage; the input counts for every question, though it is computed once."""

    input_tokens: int
    input_tokens_details: DecisionInputDetails
    output_tokens: int
    output_tokens_details: DecisionOutputDetails
    total_tokens: int


class Decision(TypedDict):
    """The answers, in the order of the questions."""

    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    model: str
    usage: DecisionUsage
