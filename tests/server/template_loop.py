"""The tool loop in chat templates: what a client sends back after a call must be accepted, shown, and read again.

`python -W ignore -m tests.server.template_loop FOLDER` prints a table of all .jinja files in a folder.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.chat_format.message import TextDelta, Tool, ToolCallDelta, ToolCallStart
from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer
from engine.types.request import RenderedPrompt
from server.generation.messages import prepare_messages
from server.schemas.chat import Message

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    Tool("get_weather", "The weather of a city", json.dumps({**PARAMETERS, "required": ["city"]})),
    Tool("ring_bell", "Ring a bell", json.dumps({"type": "object", "properties": {}})),
]
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "What about Graz?"}
ARGUMENTS = {"city": "Linz", "days": 3}
# What templates write as one token: in angle brackets or square ones.
_MARKERS = re.compile(r"<[|｜]?[A-Za-z_/][\w｜|▁ :./-]{0,40}>|\[/?[A-Z_]{3,30}\]")

Body = Mapping[str, Any]


def call(number: int, name: str, arguments: object) -> dict[str, object]:
    """A tool call in the format of answers; `arguments` may be text, as some clients send them."""
    function = {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    return {
        "id": f"call_{hashlib.sha256(name.encode()).hexdigest()[:23]}{number}",
        "type": "function",
        "function": function,
    }


def answer(called: Mapping[str, object], content: str) -> dict[str, object]:
    """What a tool answered to a call."""
    return {"role": "tool", "tool_call_id": called["id"], "content": content}


def loops() -> dict[str, tuple[list[Body], list[str]]]:
    """Conversations, and what each must show."""
    weather, bell, empty = call(0, "get_weather", ARGUMENTS), call(1, "ring_bell", {}), call(2, "ring_bell", "")
    sunny, rung = answer(weather, "sunny, 21"), answer(bell, "ding")
    one = {"role": "assistant", "content": None, "tool_calls": [weather]}
    both = {"role": "assistant", "content": "", "tool_calls": [weather, bell]}
    spoken = {"role": "assistant", "content": "Let me look.", "tool_calls": [weather]}
    thought = {**one, "reasoning_content": "I need the weather."}
    own = {"role": "assistant", "content": None, "tool_calls": [{**weather, "id": "toolu_01A-b_c"}]}
    final, more = {"role": "assistant", "content": "It is sunny."}, {"role": "user", "content": "And Wien?"}
    called = ["get_weather", "Linz", "sunny, 21"]
    return {
        "plain": ([SYSTEM, ASKED], ["Be brief.", "What about Graz?"]),
        "one": ([ASKED, one, sunny], called),
        "system": ([SYSTEM, ASKED, one, sunny], called),
        "answered": ([SYSTEM, ASKED, one, sunny, final, more], ["Linz", "It is sunny.", "And Wien?"]),
        "parallel": ([ASKED, both, sunny, rung], [*called, "ring_bell", "ding"]),
        "twice": ([ASKED, one, sunny, {**one, "tool_calls": [bell]}, rung], [*called, "ring_bell", "ding"]),
        "spoken": ([ASKED, spoken, sunny], called),
        "reasoned": ([ASKED, thought, sunny], called),
        "no arguments": ([ASKED, {**one, "tool_calls": [empty]}, answer(empty, "ding")], ["ring_bell", "ding"]),
        "other ids": ([ASKED, own, {**sunny, "tool_call_id": "toolu_01A-b_c"}, final, more], called),
    }


def tokenizer_with(template: str) -> Tokenizer:
    """A tokenizer of bytes in which the markers of the template are tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # Of Llama 3 the vocabulary has it, whatever the template says.
    known = ["<|python_tag|>"] if "<|start_header_id|>" in template else []
    markers = sorted({"<s>", "</s>", *known, *_MARKERS.findall(template)})
    backend.add_special_tokens(markers)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    return Tokenizer(tokenizer, vocabulary_size=len(tokenizer), context=100_000)


def rendered(tokenizer: Tokenizer, messages: Sequence[Body], *, opening: bool = True) -> RenderedPrompt:
    """The prompt of messages, as the server makes it."""
    talk = prepare_messages([Message.model_validate(message) for message in messages])
    return tokenizer.render_chat(talk.messages, tools=TOOLS, add_generation_prompt=opening)


def faults(template: str) -> Iterator[tuple[str, str]]:
    """Which conversation fails, and why; of a template with which tools cannot work, only that, as of "tools"."""
    tokenizer = tokenizer_with(template)
    if "tool" not in template:
        yield "tools", "the template knows none"
        return
    if not tokenizer.chat_format.supports_tool_calls:
        yield "tools", "the server refuses them: it does not know how the model writes calls"
        return
    found = [(name, fault) for name, loop in loops().items() for fault in unaccepted(tokenizer, *loop)]
    if {name for name, _ in found} == set(loops()) - {"plain", "no arguments"}:
        yield "tools", "the template leaves out what the assistant called"
        return
    yield from found
    if "one" not in {name for name, _ in found}:
        yield from (("read again", fault) for fault in misread(tokenizer))


def unaccepted(tokenizer: Tokenizer, messages: Sequence[Body], shown: Sequence[str]) -> Iterator[str]:
    """Why a conversation is not accepted, or what of it the prompt does not show."""
    try:
        text = tokenizer.decode(rendered(tokenizer, messages).tokens)
    except InvalidRequest as error:
        yield error.reason
        return
    if missing := [part for part in shown if part not in text]:
        yield f"does not show {missing}"


def misread(tokenizer: Tokenizer) -> Iterator[str]:
    """What the format of the template does not read again of a call that the template writes."""
    (asked, output, result), _ = loops()["one"]
    opened = rendered(tokenizer, [asked])
    whole = tokenizer.decode(rendered(tokenizer, [asked, output, result]).tokens)
    start = tokenizer.decode(opened.tokens)
    text = whole[len(start) :] if whole.startswith(start) else whole[whole.rindex("What about Graz?") + 16 :]
    reader = tokenizer.chat_format.parser(tuple(TOOLS), opened.generation_prompt if whole.startswith(start) else "")
    pieces = [*reader.push(text[: text.index("sunny")]), *reader.finish()]
    names = [piece.name for piece in pieces if isinstance(piece, ToolCallStart)]
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, ToolCallDelta))
    if names != ["get_weather"]:
        yield f"calls {names}: {''.join(piece.text for piece in pieces if isinstance(piece, TextDelta))[:60]!r}"
    elif json.loads(arguments) != ARGUMENTS:
        yield f"arguments {arguments}"


def main(folder: Path) -> None:
    """Print a line for each template, and how many there are of each kind."""
    kinds: Counter[str] = Counter()
    for file in sorted(folder.glob("*.jinja")):
        found = list(faults(file.read_text()))
        kind = "fails" if found else "passes"
        kinds[kind := "without tools" if found and found[0][0] == "tools" else kind] += 1
        reasons = "; ".join(f"{name}: {fault}" for name, fault in found)
        print(f"| {file.stem} | {kind} | {reasons[:400]} |".replace("\n", " "))
    print(", ".join(f"{count} {kind}" for kind, count in kinds.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
