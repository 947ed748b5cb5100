"""The formats of tool calls and of reasoning, each with the markers by which a chat template gives it away."""

from __future__ import annotations

from dataclasses import dataclass

from engine.chat_format.braces import BraceCall
from engine.chat_format.calls import NamedCall, ObjectCall
from engine.chat_format.frame import Frame
from engine.chat_format.parameters import ParameterCall
from engine.chat_format.reasoning import Thoughts


@dataclass(frozen=True, slots=True)
class Format:
    """How calls are written by models whose template holds all of these markers, and whose vocabulary this token.

    frame  None: as nothing here reads them, though the markers of another format are there
    """

    frame: Frame | None
    markers: tuple[str, ...]
    token: str = ""


_KIMI = Frame(
    NamedCall(after=("<|tool_call_argument_begin|>",), prefix="functions.", numbered=True),
    opens=("<|tool_calls_section_begin|>",),
    call=("<|tool_call_begin|>",),
    ends=("<|tool_call_end|>",),
    closes=("<|tool_calls_section_end|>",),
)
_DEEPSEEK_3 = Frame(
    NamedCall(before=("function", "<｜tool▁sep｜>"), after=("```json",)),
    opens=("<｜tool▁calls▁begin｜>",),
    call=("<｜tool▁call▁begin｜>",),
    ends=("```", "<｜tool▁call▁end｜>"),
    closes=("<｜tool▁calls▁end｜>",),
)
_DEEPSEEK_3_1 = Frame(
    NamedCall(after=("<｜tool▁sep｜>",)),
    opens=("<｜tool▁calls▁begin｜>",),
    call=("<｜tool▁call▁begin｜>",),
    ends=("<｜tool▁call▁end｜>",),
    closes=("<｜tool▁calls▁end｜>",),
)
_GLM = Frame(
    ParameterCall(
        name=("", ""), key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>"), close="</tool_call>"
    ),
    call=("<tool_call>",),
)
_FUNCTION = ParameterCall(
    name=("<function=", ">"), key=("<parameter=", ">"), value=("", "</parameter>"), close="</function>", lines=True
)
_QWEN_XML = Frame(_FUNCTION, call=("<tool_call>",), ends=("</tool_call>",))
_SEED = Frame(_FUNCTION, call=("<seed:tool_call>",), ends=("</seed:tool_call>",))
_MINIMAX = Frame(
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
    typed=(' string="true">', ' string="false">'),
)
_DSML = Frame(_DSML_CALL, opens=("<｜DSML｜function_calls>",), closes=("</｜DSML｜function_calls>",))
_DSML_4 = Frame(_DSML_CALL, opens=("<｜DSML｜tool_calls>",), closes=("</｜DSML｜tool_calls>",))
_GEMMA = Frame(BraceCall('<|"|>'), call=("<|tool_call>", "call:"), ends=("<tool_call|>",))
_FUNCTION_GEMMA = Frame(BraceCall("<escape>"), call=("<start_function_call>", "call:"), ends=("<end_function_call>",))
_MISTRAL = Frame(NamedCall(after=("[ARGS]",)), call=("[TOOL_CALLS]",))
_MISTRAL_NUMBERED = Frame(NamedCall(after=("[ARGS]",), identity="[CALL_ID]"), call=("[TOOL_CALLS]",))
_MISTRAL_LIST = Frame(ObjectCall(), opens=("[TOOL_CALLS]", "["), between=",", closes=("]",))
_COHERE = Frame(
    ObjectCall(name="tool_name", arguments="parameters"),
    opens=("<|START_ACTION|>", "["),
    between=",",
    closes=("]", "<|END_ACTION|>"),
)
_PHI = Frame(ObjectCall(), call=("<|tool_call|>",), ends=("<|/tool_call|>",))
_PHI_LIST = Frame(ObjectCall(), opens=("<|tool_call|>", "["), between=",", closes=("]", "<|/tool_call|>"))
_GRANITE = Frame(ObjectCall(), opens=("<|tool_call|>", "["), between=",", closes=("]",))
_HERMES = Frame(ObjectCall(), call=("<tool_call>",), ends=("</tool_call>",))
_APRIEL = Frame(ObjectCall(), opens=("<tool_calls>", "["), between=",", closes=("]", "</tool_calls>"))
_MINIMAX_1 = Frame(ObjectCall(), opens=("<tool_calls>",), closes=("</tool_calls>",))
_NEMOTRON = Frame(ObjectCall(), opens=("<TOOLCALL>", "["), between=",", closes=("]", "</TOOLCALL>"))
_FIREFUNCTION = Frame(ObjectCall(), opens=("functools", "["), between=",", closes=("]",))
_GIGACHAT = Frame(ObjectCall(), call=("<|function_call|>",))
_FUNCTIONARY = Frame(NamedCall(after=(">",)), call=("<function=",), ends=("</function>",))
_MINICPM = Frame(
    ParameterCall(name=("", '">'), key=('<param name="', '">'), value=("", "</param>"), close="</function>"),
    call=('<function name="',),
)
_HUNYUAN = Frame(
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
_LLAMA = Frame(ObjectCall(arguments="parameters"), opens=("<|python_tag|>",), between=";", bare=True)

# The first whose markers are there: so those with more of them stand before those with some of the same.
FORMATS = (
    # Some of its templates hold none of its markers.
    Format(_KIMI, ("tools",), token="<|tool_calls_section_begin|>"),
    Format(_DEEPSEEK_3, ("<｜tool▁calls▁begin｜>", "```json")),
    Format(_DEEPSEEK_3_1, ("<｜tool▁calls▁begin｜>",)),
    # Templates write the token apart from what follows it, and every template names tool_calls.
    Format(_DSML, ("｜DSML｜", "function_calls")),
    Format(_DSML_4, ("｜DSML｜",)),
    # MiniMax M3 names parameters by tags of their own.
    Format(None, ("]<]minimax[>[",)),
    Format(_GLM, ("<tool_call>", "<arg_key>")),
    Format(_QWEN_XML, ("<tool_call>", "<function=")),
    Format(_SEED, ("<seed:tool_call>", "<function=")),
    Format(_MINIMAX, ("<minimax:tool_call>",)),
    Format(_GEMMA, ("<|tool_call>",)),
    Format(_FUNCTION_GEMMA, ("<start_function_call>",)),
    Format(_MISTRAL_NUMBERED, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    Format(_MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    Format(_MISTRAL_LIST, ("[TOOL_CALLS]",)),
    Format(_COHERE, ("<|START_ACTION|>",)),
    Format(_PHI, ("<|tool_call|>{", "<|/tool_call|>")),
    Format(_PHI_LIST, ("<|tool_call|>", "<|/tool_call|>")),
    Format(_GRANITE, ("<|tool_call|>",)),
    Format(_APRIEL, ("<tool_calls>[",)),
    Format(_HERMES, ("<tool_call>",)),
    Format(_MINIMAX_1, ("<tool_calls>",)),
    # The template writes what its markers end in apart.
    Format(_HUNYUAN, ("<tool_calls", "':opensource'")),
    Format(_NEMOTRON, ("<TOOLCALL>",)),
    Format(_FIREFUNCTION, ("functools[",)),
    Format(_GIGACHAT, ("<|function_call|>",)),
    Format(_MINICPM, ('<function name="', '<param name="')),
    Format(_FUNCTIONARY, ("<function=", "</function>")),
    Format(_LLAMA, ('{"name": ', '"parameters": '), token="<|python_tag|>"),
)

THOUGHTS = (
    Thoughts("<think>", "</think>"),
    Thoughts("[THINK]", "[/THINK]"),
    Thoughts("<|channel>", "<channel|>", label="thought"),
    Thoughts("<|START_THINKING|>", "<|END_THINKING|>"),
    Thoughts("<seed:think>", "</seed:think>"),
)
