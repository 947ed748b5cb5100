"""llama.cpp's own completions, fill-in-the-middle, properties and slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from server.schemas import policy
from server.schemas.common import Bias, Generation, Label, TimingsBody, TokenKey
from server.schemas.completions import Prompts
from server.schemas.content import Strict

MAX_FILES = 256
# Fields that are declared below.
_DECLARED = ("n_predict", "n_probs", "samplers", "id_slot", "n_cache_reuse")
# Extensions of llama.cpp with their values that change nothing.
_LLAMA: policy.NeutralValues = {
    "dynatemp_range": (0, 0.0),
    "dynatemp_exponent": (1, 1.0),
    "mirostat": (0,),
    "mirostat_tau": (5, 5.0),
    "mirostat_eta": (0.1,),
    "min_keep": (0,),
    "n_discard": (0,),
    "lora": ([],),
    "post_sampling_probs": (False,),
    "penalize_nl": (True, False),
    "return_progress": (False,),
}


def _bias_pairs(value: Any) -> Any:
    """llama.cpp's list of [token, bias] pairs as an object; false forbids a token."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return value
    return {str(token): -100 if bias is False else bias for token, bias in value}


_SAMPLER_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "i": "infill",
}


def _sampler_names(value: Any) -> Any:
    """llama.cpp's short form, a letter for each sampler, as names."""
    return [_SAMPLER_LETTERS.get(letter, letter) for letter in value] if isinstance(value, str) else value


class LlamaGeneration(Generation):
    """A request of llama.cpp's server. Accepted without effect: `id_slot`, `n_cache_reuse` and the limits of time.

    n_predict        tokens of the answer; -1: up to the context, 0: the prompt is only computed and cached
    samplers         the samplers in use by name or letter, in any order; a parameter of another one has no effect
    response_fields  the fields of the answer, with a slash for inner ones
    """

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **{name: values for name, values in policy.EXTENSIONS.items() if name not in _DECLARED},
        **_LLAMA,
    }

    logit_bias: Annotated[
        Annotated[dict[TokenKey, Bias], Field(max_length=1024)] | None,
        BeforeValidator(_bias_pairs, json_schema_input_type=dict[TokenKey, Bias] | list[list[Any]]),
    ] = None
    n_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = None
    n_probs: Annotated[int, Field(ge=0, le=20)] | None = None
    samplers: Annotated[
        Annotated[list[Label], Field(max_length=64)] | None,
        BeforeValidator(_sampler_names, json_schema_input_type=str | list[str] | None),
    ] = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[Label], Field(max_length=64)] | None = None
    id_slot: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    n_cache_reuse: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    n_indent: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    t_max_prompt_ms: Annotated[float, Field(ge=-1)] | None = None
    t_max_predict_ms: Annotated[float, Field(ge=-1)] | None = None


class LlamaCompletionRequest(LlamaGeneration):
    """A completion request."""

    prompt: Prompts


class InputFile(Strict):
    """Another file of the project. `time` is accepted without effect."""

    text: str
    filename: str = ""
    time: Any = None


class InfillRequest(LlamaGeneration):
    """A gap between two texts: `input_prefix` and `prompt` before it, `input_suffix` after it."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[InputFile], Field(max_length=MAX_FILES)] | None = None
    prompt: str = ""


class TokenProbability(TypedDict):
    """A token with its log-probability; `top_logprobs` only at the sampled token."""

    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: NotRequired[list[TokenProbability]]


class LlamaCompletion(TypedDict):
    """An answer, or a chunk of a stream: chunks but the last one have only the first fields."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    model: NotRequired[str]
    generation_settings: NotRequired[dict[str, Any]]
    prompt: NotRequired[str]
    has_new_line: NotRequired[bool]
    truncated: NotRequired[bool]
    stop_type: NotRequired[Literal["eos", "word", "limit"]]
    stopping_word: NotRequired[str]
    tokens_cached: NotRequired[int]
    timings: NotRequired[TimingsBody]
    completion_probabilities: NotRequired[list[TokenProbability]]
    warnings: NotRequired[list[str]]


class LlamaProperties(TypedDict):
    """The server as llama.cpp describes it."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    build_info: str


class LlamaSlot(TypedDict):
    """One slot, without texts."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    next_token: NotRequired[list[dict[str, int]]]
