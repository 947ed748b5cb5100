"""POST /v1/decisions: the questions about an input, and the answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from server.schemas.chat import CacheOptions
from server.schemas.common import Label
from server.schemas.content import Breakpoint, Object, Strict
from server.schemas.response_input import MOST_ITEMS, kind_of

# OpenAI's limits.
MOST_QUESTIONS, MOST_CHOICES = 400, 255

CallId = Annotated[str, Field(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class DecisionTextPart(Strict):
    """A piece of a text, of whoever wrote it. The cache is exact to the token, whatever a breakpoint says."""

    type: Literal["input_text", "output_text"]
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


class DecisionRefusalPart(Strict):
    """What a model said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class JsonPart(Strict):
    """Data, which is read as compact JSON."""

    type: Literal["input_json"]
    data: Object | Annotated[list[Object], Field(max_length=MOST_ITEMS)]


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
    Annotated[str, Tag("string")] | Annotated[list[Part], Field(max_length=MOST_ITEMS), Tag("parts")],
    Discriminator(_shape),
]


class DecisionMessageItem(Strict):
    """A message of a conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "developer", "system", "assistant"]
    content: Text
    phase: Literal["commentary", "final_answer"] | None = None


class DecisionCallItem(Strict):
    """A call of a tool: arguments as JSON text for a function, any text for a custom one."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: CallId
    name: Label
    arguments: str | None = None
    input: str | None = None
    namespace: Label | None = None
    id: Label | None = None
    status: Status | None = None


class DecisionCallOutputItem(Strict):
    """What a tool answered to the call of that id."""

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
    | Annotated[list[Item], Field(min_length=1, max_length=MOST_ITEMS), Tag("parts")],
    Discriminator(_shape),
]


class _QuestionFields(Strict):
    name: Label | None = None
    instructions: Text


class Predicate(_QuestionFields):
    """How likely a statement about the input is true."""

    type: Literal["predicate"]


class ChoiceOption(Strict):
    """Something to choose. A string and a boolean of the same text are two values."""

    value: str | bool
    description: str | None = None


def _distinct(choices: list[ChoiceOption]) -> list[ChoiceOption]:
    if len({(type(choice.value), choice.value) for choice in choices}) < len(choices):
        raise PydanticCustomError("invalid_value", "each value may be there once")
    return choices


class ChoiceQuestion(_QuestionFields):
    """Which of several things fits the input."""

    type: Literal["choice"]
    choices: Annotated[list[ChoiceOption], Field(min_length=2, max_length=MOST_CHOICES), AfterValidator(_distinct)]


class ScoreLevel(Strict):
    """A step of a scale."""

    label: str
    description: str | None = None


class ScoreQuestion(_QuestionFields):
    """Where the input stands on a scale of ordered levels."""

    type: Literal["score"]
    levels: Annotated[list[ScoreLevel], Field(min_length=2, max_length=MOST_CHOICES)]


Question = Annotated[Predicate | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]


class DecisionRequest(Strict):
    """Questions about one input, each answered by itself."""

    model: str | None = None
    input: Input
    questions: Annotated[list[Question], Field(min_length=1, max_length=MOST_QUESTIONS)]
    prompt_cache_key: Label | None = None
    prompt_cache_options: CacheOptions | None = None
    safety_identifier: Label | None = None


class PredicateAnswer(TypedDict):
    """How likely the statement is true, of true and false."""

    type: Literal["predicate"]
    name: str | None
    probability: float


class ChoiceProbability(TypedDict):
    """How likely one thing is, of all that can be chosen."""

    value: str | bool
    probability: float


class ChoiceAnswer(TypedDict):
    """The likeliest thing; `confidence` is its probability among all that the model could have said."""

    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class ScoreProbability(TypedDict):
    """How likely one level is, of all; `value` counts levels from 0."""

    label: str
    probability: float
    value: int


class ScoreAnswer(TypedDict):
    """The expected level, counted from 0; `confidence` is the probability of the likeliest among all that could be."""

    type: Literal["score"]
    name: str | None
    score: float
    confidence: float
    probabilities: list[ScoreProbability]


class DecisionInputDetails(TypedDict):
    """Of the input's tokens, those that were found in the cache, and those that were computed into it."""

    cached_tokens: int
    cache_write_tokens: int


class DecisionOutputDetails(TypedDict):
    """No question is reasoned about."""

    reasoning_tokens: int


class DecisionUsage(TypedDict):
    """What it cost, in tokens; the input counts for every question, and is computed for the first."""

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
