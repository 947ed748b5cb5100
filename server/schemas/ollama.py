"""Requests and responses of Ollama's API, /api/...; streams are one JSON object per line.

Options for loading (num_gpu, num_thread, ...) are accepted without effect, because clients send them with every
request. Unsupported fields that would change the answer are refused by name; parameters that the server exceeds or
cannot follow without another answer (num_ctx, keep_alive) add a line to the answer's warnings.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Discriminator, Field, StringConstraints, Tag
from typing_extensions import TypedDict

from server.schemas import policy
from server.schemas.chat import ChatLogprob
from server.schemas.common import Count, Label, Stops
from server.schemas.content import MAX_PARTS, Object, Strict
from server.schemas.media import InlineImage

_Any = Annotated[Any, Field()]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=512)]
# A name to create, in Ollama's format.
_PART = "[A-Za-z0-9_]([A-Za-z0-9_.-]{0,78}[A-Za-z0-9_-])?"
NewModelName = Annotated[str, StringConstraints(pattern=rf"^{_PART}(/{_PART}){{0,2}}(:{_PART})?$")]
# A duration such as "5m", or seconds.
KeepAlive = Label | float | int
Images = Annotated[list[InlineImage], Field(max_length=MAX_PARTS)]


class OllamaOptions(Strict):
    """Sampling options by llama.cpp's names."""

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.OLLAMA_OPTIONS

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stops | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    num_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = None
    num_ctx: Count | None = None
    num_keep: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    f16_kv: _Any = None
    low_vram: _Any = None
    main_gpu: _Any = None
    num_batch: _Any = None
    num_gpu: _Any = None
    num_thread: _Any = None
    numa: _Any = None
    use_mlock: _Any = None
    use_mmap: _Any = None
    vocab_only: _Any = None
    logits_all: _Any = None
    embedding_only: _Any = None


class OllamaCalledFunction(Strict):
    """A called function with its arguments as an object."""

    name: Label
    arguments: Object = {}
    index: int | None = None
    description: str | None = None


class OllamaToolCall(Strict):
    """A tool call of the history."""

    id: Label | None = None
    type: Literal["function"] | None = None
    function: OllamaCalledFunction


class OllamaMessage(Strict):
    """A message; its images, in base64, precede its text."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_name: Label | None = None
    tool_call_id: Label | None = None
    tool_calls: Annotated[list[OllamaToolCall], Field(max_length=128)] | None = None
    images: Images | None = None


def _format(value: object) -> str:
    return "object" if isinstance(value, dict) else "text"


Format = Annotated[
    Annotated[Literal["", "json"], Tag("text")] | Annotated[Object, Tag("object")], Discriminator(_format)
]


class OllamaGenerationFields(Strict):
    """Fields shared by chat and generate.

    keep_alive  has no effect: the model is always loaded
    shift       whether a full context is shifted; the server's setting if absent
    """

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.OLLAMA

    model: str
    options: OllamaOptions | None = None
    format: Format | None = None
    stream: bool | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    shift: bool | None = None


class OllamaChatRequest(OllamaGenerationFields):
    """POST /api/chat. Without messages it only checks that the model is loaded."""

    messages: Annotated[list[OllamaMessage], Field(max_length=2048)] = []
    tools: Annotated[list[Object], Field(max_length=128)] | None = None


class GenerateRequest(OllamaGenerationFields):
    """POST /api/generate.

    raw       the prompt is continued without the chat template
    suffix    the text after the answer, also without the chat template
    template  the model's own one only
    """

    prompt: str = ""
    images: Images | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None

    @property
    def without_template(self) -> bool:
        """Whether the prompt is continued without the chat template."""
        return bool(self.raw or self.suffix)


class OllamaEmbedRequest(Strict):
    """POST /api/embed. Longer inputs are truncated unless `truncate` is false."""

    model: str
    input: str | Annotated[list[str], Field(max_length=2048)]
    truncate: bool | None = None
    dimensions: Count | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingRequest(Strict):
    """POST /api/embeddings, the older endpoint."""

    model: str
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class ModelReference(Strict):
    """The name of a model; older clients send `name`."""

    model: ModelName | None = None
    name: ModelName | None = None

    @property
    def named(self) -> str | None:
        """The name of the model."""
        return self.model or self.name


class ShowRequest(ModelReference):
    """POST /api/show. `verbose` has no effect: the card is complete."""

    verbose: bool | None = None


class DeleteRequest(ModelReference):
    """DELETE /api/delete."""


class PullRequest(ModelReference):
    """POST /api/pull. `insecure` may only be false."""

    insecure: Literal[False] | None = None
    stream: bool | None = None


class CopyRequest(Strict):
    """POST /api/copy."""

    source: ModelName
    destination: NewModelName


class CreateRequest(ModelReference):
    """POST /api/create: a served model under another name, with a system prompt, parameters and first messages.

    The last fields name files and formats of another model, which only a restart could serve; they are refused.
    """

    model: NewModelName | None = None
    name: NewModelName | None = None
    from_: Annotated[ModelName | None, Field(alias="from")] = None
    system: str | None = None
    template: str | None = None
    license: str | Annotated[list[str], Field(max_length=64)] | None = None
    parameters: OllamaOptions | None = None
    messages: Annotated[list[OllamaMessage], Field(max_length=256)] | None = None
    stream: bool | None = None
    files: _Any = None
    adapters: _Any = None
    modelfile: _Any = None
    path: _Any = None
    quantize: _Any = None
    quantization: _Any = None


class OllamaCall(TypedDict):
    """A tool call of an answer."""

    id: str
    function: dict[str, Any]


class OllamaAnswerMessage(TypedDict):
    """The delta of a chat line."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class OllamaLine(TypedDict):
    """One line of a stream, or the complete response; the last one has usage, timings and warnings."""

    model: str
    created_at: str
    done: bool
    message: NotRequired[OllamaAnswerMessage]
    response: NotRequired[str]
    thinking: NotRequired[str]
    logprobs: NotRequired[list[ChatLogprob]]
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    warnings: NotRequired[list[str]]


class OllamaEmbeddings(TypedDict):
    """Embeddings of a list of texts, with usage and timings."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(TypedDict):
    """The embedding of one text."""

    embedding: list[float]


class OllamaStatus(TypedDict):
    """A line of /api/pull and /api/create: a step, with bytes of a download, or an error."""

    status: NotRequired[str]
    digest: NotRequired[str]
    total: NotRequired[int]
    completed: NotRequired[int]
    error: NotRequired[str]


class OllamaErrorBody(TypedDict):
    """The body of every response with a status of 400 or more, and the last line of a failed stream."""

    error: str


class Version(TypedDict):
    """The version of Ollama whose API the server has, and the server's own."""

    version: str
    cellar_version: str


def now() -> str:
    """The time in Ollama's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
