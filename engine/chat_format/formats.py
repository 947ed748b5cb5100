"""Known formats of tool calls and of reasoning, with the markers by which a chat template is recognised."""

from __future__ import annotations

from dataclasses import dataclass

from engine.chat_format.brace_call import BraceCall
from engine.chat_format.calls import NamedCall, ObjectCall
from engine.chat_format.markers import ReasoningMarkers, ToolCallMarkers
from engine.chat_format.parameter_call import ParameterCall


@dataclass(frozen=True, slots=True)
class KnownFormat:
    """A tool call format of models with all of `markers` in their template and, if given, `token` in their vocabulary.

    tool_calls  None: recognised but unsupported, though the template also has markers of another format
    """

    tool_calls: ToolCallMarkers | None
    markers: tuple[str, ...]
    token: str = ""


_KIMI = ToolCallMarkers(
    NamedCall(name_suffix=("<|tool_call_argument_begin|>",), namespace="functions.", numbered=True),
    opens=("<|tool_calls_section_begin|>",),
    call=("<|tool_call_begin|>",),
    call_ends=("<|tool_call_end|>",),
    closes=("<|tool_calls_section_end|>",),
)
_DEEPSEEK_3 = ToolCallMarkers(
    NamedCall(name_prefix=("function", "<｜tool▁sep｜>"), name_suffix=("```json",)),
    opens=("<｜tool▁calls▁begin｜>",),
    call=("<｜tool▁call▁begin｜>",),
    call_ends=("```", "<｜tool▁call▁end｜>"),
    closes=("<｜tool▁calls▁end｜>",),
)
_DEEPSEEK_3_1 = ToolCallMarkers(
    NamedCall(name_suffix=("<｜tool▁sep｜>",)),
    opens=("<｜tool▁calls▁begin｜>",),
    call=("<｜tool▁call▁begin｜>",),
    call_ends=("<｜tool▁call▁end｜>",),
    closes=("<｜tool▁calls▁end｜>",),
)
_GLM = ToolCallMarkers(
    ParameterCall(
        name=("", ""), key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>"), close="</tool_call>"
    ),
    call=("<tool_call>",),
)
_FUNCTION = ParameterCall(
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    close="</function>",
    on_own_lines=True,
)
_QWEN_XML = ToolCallMarkers(_FUNCTION, call=("<tool_call>",), call_ends=("</tool_call>",))
_SEED = ToolCallMarkers(_FUNCTION, call=("<seed:tool_call>",), call_ends=("</seed:tool_call>",))
_MINIMAX = ToolCallMarkers(
    ParameterCall(
        name=('<invoke name="', '">'), key=('<parameter name="', '">'), value=("", "</parameter>"), close="</invoke>"
    ),
    opens=("<minimax:tool_call>",),
    closes=("</minimax:tool_call>",),
)
_DSML_CALL = ParameterCall(
    name=('<｜DSML｜invoke name="', '">'),
    key=('<｜DSML｜parameter name="', '"'),
    value=("", "</｜DSML｜parameter>"),
    close="</｜DSML｜invoke>",
    type_markers=(' string="true">', ' string="false">'),
)
_DSML = ToolCallMarkers(_DSML_CALL, opens=("<｜DSML｜function_calls>",), closes=("</｜DSML｜function_calls>",))
_DSML_4 = ToolCallMarkers(_DSML_CALL, opens=("<｜DSML｜tool_calls>",), closes=("</｜DSML｜tool_calls>",))
_GEMMA = ToolCallMarkers(BraceCall('<|"|>'), call=("<|tool_call>", "call:"), call_ends=("<tool_call|>",))
_FUNCTION_GEMMA = ToolCallMarkers(
    BraceCall("<escape>"), call=("<start_function_call>", "call:"), call_ends=("<end_function_call>",)
)
_MISTRAL = ToolCallMarkers(NamedCall(name_suffix=("[ARGS]",)), call=("[TOOL_CALLS]",))
_MISTRAL_NUMBERED = ToolCallMarkers(NamedCall(name_suffix=("[ARGS]",), id_marker="[CALL_ID]"), call=("[TOOL_CALLS]",))
_MISTRAL_LIST = ToolCallMarkers(ObjectCall(), opens=("[TOOL_CALLS]", "["), separator=",", closes=("]",))
_COHERE = ToolCallMarkers(
    ObjectCall(name="tool_name", arguments="parameters"),
    opens=("<|START_ACTION|>", "["),
    separator=",",
    closes=("]", "<|END_ACTION|>"),
)
_PHI = ToolCallMarkers(ObjectCall(), call=("<|tool_call|>",), call_ends=("<|/tool_call|>",))
_PHI_LIST = ToolCallMarkers(ObjectCall(), opens=("<|tool_call|>", "["), separator=",", closes=("]", "<|/tool_call|>"))
_GRANITE = ToolCallMarkers(ObjectCall(), opens=("<|tool_call|>", "["), separator=",", closes=("]",))
_HERMES = ToolCallMarkers(ObjectCall(), call=("<tool_call>",), call_ends=("</tool_call>",))
_APRIEL = ToolCallMarkers(ObjectCall(), opens=("<tool_calls>", "["), separator=",", closes=("]", "</tool_calls>"))
_MINIMAX_1 = ToolCallMarkers(ObjectCall(), opens=("<tool_calls>",), closes=("</tool_calls>",))
_NEMOTRON = ToolCallMarkers(ObjectCall(), opens=("<TOOLCALL>", "["), separator=",", closes=("]", "</TOOLCALL>"))
_FIREFUNCTION = ToolCallMarkers(ObjectCall(), opens=("functools", "["), separator=",", closes=("]",))
_GIGACHAT = ToolCallMarkers(ObjectCall(), call=("<|function_call|>",))
_FUNCTIONARY = ToolCallMarkers(NamedCall(name_suffix=(">",)), call=("<function=",), call_ends=("</function>",))
_MINICPM = ToolCallMarkers(
    ParameterCall(name=("", '">'), key=('<param name="', '">'), value=("", "</param>"), close="</function>"),
    call=('<function name="',),
)
_HUNYUAN = ToolCallMarkers(
    ParameterCall(
        name=("", "<tool_sep:opensource>"),
        key=("<arg_key:opensource>", "</arg_key:opensource>"),
        value=("<arg_value:opensource>", "</arg_value:opensource>"),
        close="</tool_call:opensource>",
    ),
    opens=("<tool_calls:opensource>",),
    call=("<tool_call:opensource>",),
    closes=("</tool_calls:opensource>",),
)
_LLAMA = ToolCallMarkers(
    ObjectCall(arguments="parameters"), opens=("<|python_tag|>",), separator=";", allows_unmarked=True
)

# The first match is used: formats with more markers come before formats with a subset of the same markers.
TOOL_CALL_FORMATS = (
    # Some Kimi templates contain none of the markers.
    KnownFormat(_KIMI, ("tools",), token="<|tool_calls_section_begin|>"),
    KnownFormat(_DEEPSEEK_3, ("<｜tool▁calls▁begin｜>", "```json")),
    KnownFormat(_DEEPSEEK_3_1, ("<｜tool▁calls▁begin｜>",)),
    # Templates build the marker from parts, and every template contains "tool_calls".
    KnownFormat(_DSML, ("｜DSML｜", "function_calls")),
    KnownFormat(_DSML_4, ("｜DSML｜",)),
    # MiniMax M3 has a separate tag for each parameter.
    KnownFormat(None, ("]<]minimax[>[",)),
    KnownFormat(_GLM, ("<tool_call>", "<arg_key>")),
    KnownFormat(_QWEN_XML, ("<tool_call>", "<function=")),
    KnownFormat(_SEED, ("<seed:tool_call>", "<function=")),
    KnownFormat(_MINIMAX, ("<minimax:tool_call>",)),
    KnownFormat(_GEMMA, ("<|tool_call>",)),
    KnownFormat(_FUNCTION_GEMMA, ("<start_function_call>",)),
    KnownFormat(_MISTRAL_NUMBERED, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    KnownFormat(_MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    KnownFormat(_MISTRAL_LIST, ("[TOOL_CALLS]",)),
    KnownFormat(_COHERE, ("<|START_ACTION|>",)),
    KnownFormat(_PHI, ("<|tool_call|>{", "<|/tool_call|>")),
    KnownFormat(_PHI_LIST, ("<|tool_call|>", "<|/tool_call|>")),
    KnownFormat(_GRANITE, ("<|tool_call|>",)),
    KnownFormat(_APRIEL, ("<tool_calls>[",)),
    KnownFormat(_HERMES, ("<tool_call>",)),
    KnownFormat(_MINIMAX_1, ("<tool_calls>",)),
    # The template appends the end of the markers by an expression.
    KnownFormat(_HUNYUAN, ("<tool_calls", "':opensource'")),
    KnownFormat(_NEMOTRON, ("<TOOLCALL>",)),
    KnownFormat(_FIREFUNCTION, ("functools[",)),
    KnownFormat(_GIGACHAT, ("<|function_call|>",)),
    KnownFormat(_MINICPM, ('<function name="', '<param name="')),
    KnownFormat(_FUNCTIONARY, ("<function=", "</function>")),
    KnownFormat(_LLAMA, ('{"name": ', '"parameters": '), token="<|python_tag|>"),
)

REASONING_FORMATS = (
    ReasoningMarkers("<think>", "</think>"),
    ReasoningMarkers("[THINK]", "[/THINK]"),
    ReasoningMarkers("<|channel>", "<channel|>", label="thought"),
    ReasoningMarkers("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarkers("<seed:think>", "</seed:think>"),
)
