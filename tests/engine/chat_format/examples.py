"""One example model per chat format: template, added tokens, and tool calls as the model writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from engine.chat_format.chat_format import ChatFormat
from engine.chat_format.detection import AddedVocabulary, detect_chat_format
from engine.chat_format.message import AnswerDelta, ReasoningDelta, TextDelta, Tool, ToolCallDelta, ToolCallStart
from tests.selection import quick

Arguments = Mapping[str, object]
Calls = Sequence[tuple[str, Arguments]]

PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "sure": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "string"}}},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "additionalProperties": False,
}
TOOLS = [Tool("get_weather", "", json.dumps(PARAMETERS), strict=True), Tool("ring-2", "", json.dumps(PARAMETERS))]


@dataclass(frozen=True, slots=True)
class FormatExample:
    """A model with one chat format: its template, its special tokens, and its notation of tool calls."""

    template: str
    tokens: tuple[str, ...]
    write: Callable[[Calls], str]
    reasoning: tuple[str, str] = ("<think>", "</think>")
    generation_prompt: str = ""

    @property
    def chat_format(self) -> ChatFormat:
        """The detected chat format; the special tokens are numbered from 0."""
        return chat_format_of(self.template, self.tokens)


@cache
def chat_format_of(template: str, tokens: tuple[str, ...]) -> ChatFormat:
    """The chat format detected for a template and a vocabulary of special tokens and single characters."""
    added = {token: number for number, token in enumerate(tokens)}

    def encode(text: str) -> list[int]:
        return [added[text]] if text in added else [1000 + ord(letter) for letter in text]

    return detect_chat_format(template, AddedVocabulary(added, frozenset(tokens), encode))


def plain(value: object) -> str:
    """JSON as templates write it."""
    return json.dumps(value, ensure_ascii=False)


def bare(value: object) -> str:
    """A string without quotes, anything else as JSON."""
    return value if isinstance(value, str) else plain(value)


def _hermes(calls: Calls) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": {plain(name)}, "arguments": {plain(given)}}}\n</tool_call>' for name, given in calls
    )


def _qwen_xml(calls: Calls) -> str:
    def one(name: str, given: Arguments) -> str:
        lines = "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in given.items())
        return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _glm(calls: Calls) -> str:
    def one(name: str, given: Arguments) -> str:
        lines = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{bare(value)}</arg_value>\n" for key, value in given.items()
        )
        return f"<tool_call>{name}\n{lines}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _minimax(calls: Calls) -> str:
    def one(name: str, given: Arguments) -> str:
        lines = "".join(f'<parameter name="{key}">{bare(value)}</parameter>\n' for key, value in given.items())
        return f'<invoke name="{name}">\n{lines}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(one(*call) for call in calls)}</minimax:tool_call>"


def _dsml(calls: Calls) -> str:
    def one(name: str, given: Arguments) -> str:
        lines = ""
        for key, value in given.items():
            head = f'name="{key}" string="{plain(isinstance(value, str))}"'
            lines += f"<｜DSML｜parameter {head}>{bare(value)}</｜DSML｜parameter>\n"
        return f'<｜DSML｜invoke name="{name}">\n{lines}</｜DSML｜invoke>\n'

    return f"<｜DSML｜function_calls>\n{''.join(one(*call) for call in calls)}</｜DSML｜function_calls>"


def _dsml_4(calls: Calls) -> str:
    return _dsml(calls).replace("function_calls", "tool_calls")


def _llama(calls: Calls) -> str:
    return "; ".join(f'{{"name": {plain(name)}, "parameters": {plain(given)}}}' for name, given in calls)


def _python_tag(calls: Calls) -> str:
    return f"<|python_tag|>{_llama(calls)}"


def _mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{plain(given)}" for name, given in calls)


def _mistral_numbered(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcdef123[ARGS]{plain(given)}" for name, given in calls)


def _objects(calls: Calls, name: str = "name", arguments: str = "arguments") -> str:
    return ", ".join(plain({name: called, arguments: given, "id": "abcdef123"}) for called, given in calls)


def _mistral_list(calls: Calls) -> str:
    return f"[TOOL_CALLS] [{_objects(calls)}]"


def _seed(calls: Calls) -> str:
    return _qwen_xml(calls).replace("tool_call>", "seed:tool_call>")


def _phi(calls: Calls) -> str:
    return "".join(f"<|tool_call|>{_objects([call])}<|/tool_call|>" for call in calls)


def _phi_list(calls: Calls) -> str:
    return f"<|tool_call|>[{_objects(calls)}]<|/tool_call|>"


def _granite(calls: Calls) -> str:
    return f"<|tool_call|>[{_objects(calls)}]"


def _apriel(calls: Calls) -> str:
    return f"<tool_calls>[{_objects(calls)}]</tool_calls>"


def _minimax_1(calls: Calls) -> str:
    return "<tool_calls>\n" + "".join(f"{_objects([call])}\n" for call in calls) + "</tool_calls>"


def _nemotron(calls: Calls) -> str:
    return f"<TOOLCALL>[{_objects(calls)}]</TOOLCALL>"


def _firefunction(calls: Calls) -> str:
    return f"functools[{_objects(calls)}]"


def _gigachat(calls: Calls) -> str:
    return "".join(f"<|function_call|>{_objects([call])}" for call in calls)


def _functionary(calls: Calls) -> str:
    return "".join(f"<function={name}>{plain(given)}</function>" for name, given in calls)


def _minicpm(calls: Calls) -> str:
    def one(name: str, given: Arguments) -> str:
        lines = "".join(f'<param name="{key}">{bare(value)}</param>' for key, value in given.items())
        return f'<function name="{name}">{lines}</function>'

    return "\n".join(one(*call) for call in calls)


def _hunyuan(calls: Calls) -> str:
    def one(name: str, given: Arguments) -> str:
        lines = "".join(
            f"<arg_key:opensource>{key}</arg_key:opensource>\n"
            f"<arg_value:opensource>{bare(value)}</arg_value:opensource>\n"
            for key, value in given.items()
        )
        return f"<tool_call:opensource>{name}<tool_sep:opensource>\n{lines}</tool_call:opensource>\n"

    return f"<tool_calls:opensource>\n{''.join(one(*call) for call in calls)}</tool_calls:opensource>"


def _cohere(calls: Calls) -> str:
    return f"<|START_ACTION|>[\n    {_objects(calls, 'tool_name', 'parameters')}\n]<|END_ACTION|>"


def _deepseek_3(calls: Calls) -> str:
    each = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{plain(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    ]
    return f"<｜tool▁calls▁begin｜>{chr(10).join(each)}<｜tool▁calls▁end｜>"


def _deepseek_3_1(calls: Calls) -> str:
    each = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{plain(given)}<｜tool▁call▁end｜>" for name, given in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def _kimi(calls: Calls) -> str:
    each = [
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{plain(given)}<|tool_call_end|>"
        for at, (name, given) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def _braces(value: object, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_braces(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_braces(item, quote) for item in value) + "]"
    return json.dumps(value)


def _gemma(calls: Calls) -> str:
    written = [(name, _braces(dict(given), '<|"|>')) for name, given in calls]
    return "".join(f"<|tool_call>call:{name}{given}<tool_call|>" for name, given in written)


def _function_gemma(calls: Calls) -> str:
    written = [(name, _braces(dict(given), "<escape>")) for name, given in calls]
    return "".join(f"<start_function_call>call:{name}{given}<end_function_call>" for name, given in written)


def _harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{plain(given)}<|call|>"
        for name, given in calls
    )


_THINK = "<think></think>"
_PAIR = ("<tool_call>", "</tool_call>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
_MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")

EXAMPLES = {
    "hermes": FormatExample(_THINK + "".join(_PAIR), (), _hermes),
    "hermes tokens": FormatExample(_THINK + "".join(_PAIR), (*_PAIR, "<think>", "</think>", "<|im_end|>"), _hermes),
    "qwen xml": FormatExample(_THINK + "<tool_call><function=", _PAIR, _qwen_xml),
    "glm": FormatExample(_THINK + "<tool_call><arg_key>", (*_PAIR, "<arg_key>", "</arg_key>"), _glm),
    "minimax": FormatExample(_THINK + "<minimax:tool_call>", (), _minimax),
    "dsml": FormatExample(_THINK + "<｜DSML｜function_calls>", (), _dsml),
    "dsml 4": FormatExample(_THINK + "<｜DSML｜tool_calls>", (), _dsml_4),
    "llama": FormatExample(_THINK + '{"name": "parameters": ', ("<|python_tag|>", "<|eom_id|>"), _llama),
    "python tag": FormatExample(_THINK + '{"name": "parameters": ', ("<|python_tag|>", "<|eom_id|>"), _python_tag),
    "mistral": FormatExample("[TOOL_CALLS][ARGS]", _MISTRAL, _mistral, ("[THINK]", "[/THINK]")),
    "mistral numbered": FormatExample(
        "[TOOL_CALLS][CALL_ID][ARGS]", _MISTRAL, _mistral_numbered, ("[THINK]", "[/THINK]")
    ),
    "mistral list": FormatExample("[TOOL_CALLS]", _MISTRAL[:1], _mistral_list, ("", "")),
    "seed": FormatExample(
        "<seed:think></seed:think><seed:tool_call><function=", (), _seed, ("<seed:think>", "</seed:think>")
    ),
    "phi": FormatExample(_THINK + "<|tool_call|>{}<|/tool_call|>", (), _phi),
    "phi list": FormatExample(_THINK + "<|tool_call|><|/tool_call|>", (), _phi_list),
    "granite": FormatExample(_THINK + "<|tool_call|>", ("<|tool_call|>",), _granite),
    "apriel": FormatExample(_THINK + "<tool_calls>[</tool_calls><tool_call>", (), _apriel),
    "minimax 1": FormatExample(_THINK + "<tool_calls></tool_calls>", (), _minimax_1),
    "nemotron": FormatExample(_THINK + "<TOOLCALL>[]</TOOLCALL>", (), _nemotron),
    "firefunction": FormatExample(_THINK + "functools[]", (), _firefunction),
    "gigachat": FormatExample(_THINK + "<|function_call|>", ("<|function_call|>",), _gigachat),
    "functionary": FormatExample(_THINK + "<function=></function>", (), _functionary),
    "minicpm": FormatExample(_THINK + '<function name="<param name="', (), _minicpm),
    "hunyuan": FormatExample(
        _THINK + "'<tool_calls' ~ ':opensource'",
        ("<tool_calls:opensource>", "</tool_calls:opensource>", "<tool_call:opensource>", "</tool_call:opensource>"),
        _hunyuan,
    ),
    "cohere": FormatExample(
        "<|START_THINKING|><|END_THINKING|><|START_ACTION|>",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>"),
        _cohere,
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "deepseek 3": FormatExample(_THINK + "<｜tool▁calls▁begin｜>```json", _DEEPSEEK, _deepseek_3),
    "deepseek 3.1": FormatExample(_THINK + "<｜tool▁calls▁begin｜>", _DEEPSEEK, _deepseek_3_1),
    "kimi": FormatExample(_THINK + "{% if tools %}", _KIMI, _kimi),
    "gemma": FormatExample(
        "<|tool_call><|channel><channel|>",
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        _gemma,
        ("<|channel>thought\n", "<channel|>"),
    ),
    "function gemma": FormatExample(
        "<start_function_call>", ("<start_function_call>", "<end_function_call>", "<escape>"), _function_gemma, ("", "")
    ),
    "harmony": FormatExample(
        "".join(_HARMONY),
        (*_HARMONY, "analysis"),
        _harmony,
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        "<|start|>assistant",
    ),
}

# A format of each kind of markers and arguments; the tests of the others are slow.
COMMON = (
    *("hermes tokens", "qwen xml", "glm", "dsml", "python tag", "mistral numbered", "phi list"),
    *("functionary", "cohere", "deepseek 3", "kimi", "gemma", "harmony"),
)
every_format = pytest.mark.parametrize("name", quick(COMMON, EXAMPLES))


def read(
    chat_format: ChatFormat, parts: Iterable[str], tools: Sequence[Tool] = TOOLS, generation_prompt: str = ""
) -> list[AnswerDelta]:
    """The deltas of an answer that arrives in `parts`, adjacent ones merged."""
    reader = chat_format.parser(tools, generation_prompt)
    found = [delta for part in parts for delta in reader.push(part)]
    return joined([*found, *reader.finish()])


def joined(deltas: Iterable[AnswerDelta]) -> list[AnswerDelta]:
    """Deltas with adjacent ones of one kind merged."""
    whole: list[AnswerDelta] = []
    for delta in deltas:
        match whole[-1:], delta:
            case [TextDelta(before)], TextDelta(after):
                whole[-1] = TextDelta(before + after)
            case [ReasoningDelta(before)], ReasoningDelta(after):
                whole[-1] = ReasoningDelta(before + after)
            case [ToolCallDelta(index, before)], ToolCallDelta(same, after) if index == same:
                whole[-1] = ToolCallDelta(index, before + after)
            case _:
                whole.append(delta)
    return whole


def calls_of(deltas: Iterable[AnswerDelta]) -> list[tuple[str, str]]:
    """Names and arguments of the tool calls."""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        match delta:
            case ToolCallStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ToolCallDelta(index, text):
                name, before = calls[index]
                calls[index] = (name, before + text)
    return calls
