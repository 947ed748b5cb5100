"""Text to tokens and back, for any tokenizer that transformers can load.

The HTTP side encodes in worker threads under a lock, the engine thread decodes without one: tokenizers of the Rust
library (0.23 and later) decode while another thread encodes. Of other tokenizers each side has a copy of its own.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.chat_format.detection import Vocabulary, detect_chat_format
from engine.chat_format.message import Tool
from engine.errors import ContextTooLong, InvalidRequest
from engine.text.detokenizer import Detokenizer, IncrementalDetokenizer, TokenBytes, detokenize
from engine.text.outline import TEMPLATE_ERRORS, Messages, outline
from engine.text.template import extend_environment, template_variables
from engine.text.tool_call_format import ToolCallFormat, detect_tool_call_format
from engine.text.wording import undeclared_variables
from engine.types.events import Logprob
from engine.types.request import RenderedPrompt

# A letter that no token has beside others, and how many tokens it may be with a space before it.
_SEPARATOR, _MAX_SEPARATOR_TOKENS = "\x02", 4


class Tokenizer:
    """Encodes prompts and renders chats; `detokenizer` gives the engine thread what it needs for the way back.

    context  tokens that a sequence may hold: text that is certain to have more is refused unread
    longest  the context that another setting allows, for that error
    chat_format  how the model writes reasoning and tool calls
    """

    def __init__(self, tokenizer: Any, *, vocabulary_size: int, context: int, max_context: int = 0) -> None:
        self._tokenizer = tokenizer
        self._context, self._max_context = context, max_context
        known = tokenizer.get_vocab()
        self._max_token_bytes = max(len(token.encode()) for token in known)
        self._token_bytes = TokenBytes(tokenizer, known)
        # A copy of a fast tokenizer with 262k tokens takes 2 s of processor time.
        self._engine_tokenizer = tokenizer if getattr(tokenizer, "is_fast", False) else copy.deepcopy(tokenizer)
        self._engine_token_bytes = (
            self._token_bytes if self._engine_tokenizer is tokenizer else TokenBytes(self._engine_tokenizer, known)
        )
        self._lock = threading.Lock()
        self._vocabulary_size = vocabulary_size
        self._added_tokens = tuple(str(token) for token in tokenizer.get_added_vocab())
        self.special_tokens = frozenset(tokenizer.all_special_ids)
        self.eos_tokens = frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
        self._template_names = undeclared_variables(_template_text(tokenizer))
        for template in _templates(tokenizer):
            extend_environment(template)
        self._call_format = detect_tool_call_format(self._render_sample) if self.has_chat_template else ToolCallFormat()
        response = getattr(tokenizer, "response_template", None)
        self.chat_format = detect_chat_format(_template_text(tokenizer), self._lexicon(), response)

    def with_context(self, context: int, max_context: int) -> Tokenizer:
        """Itself, for sequences that may hold so many tokens, or `max_context` with another setting."""
        self._context, self._max_context = context, max_context
        return self

    def pieces(self) -> dict[int, str]:
        """Every token by its id, as the vocabulary writes it."""
        return {number: piece for piece, number in self._tokenizer.get_vocab().items()}

    def token_bytes(self, size: int) -> tuple[list[bytes], list[int]]:
        """The bytes of at least `size` tokens, as they stand in the middle of a text, and which of them are markers.

        A marker is never a part of text: special tokens, and added ones in angle brackets. For any thread.
        """
        added = self._tokenizer.get_added_vocab()
        markers = {token for piece, token in added.items() if piece.startswith("<") and piece.endswith(">")}
        return self._engine_token_bytes.all_token_bytes(self.pieces(), size), sorted(
            markers | self._engine_token_bytes.special_tokens
        )

    def encode_inside_text(self, text: str) -> list[int]:
        """The tokens of a text that stands in the middle of another; none where it is not spelt alone. For any thread.

        A tokenizer may put a space before a text, so another letter stands there.
        """
        tokens = self._engine_token_bytes.encode(_SEPARATOR + text)
        for count in range(1, min(len(tokens), _MAX_SEPARATOR_TOKENS) + 1):
            if b"".join(map(self._engine_token_bytes.token_bytes, tokens[:count])).strip() == _SEPARATOR.encode():
                return tokens[count:]
        return []

    @property
    def has_chat_template(self) -> bool:
        """Whether the model came with a template for conversations."""
        return bool(self._tokenizer.chat_template)

    @property
    def template(self) -> str:
        """The text of that template; empty: there is none."""
        return _template_text(self._tokenizer) or ""

    def single_token(self, text: str) -> int | None:
        """The one token that the whole text is, if it is one."""
        if not text:
            return None
        with self._lock:
            tokens = self._encode(_checked_text(text, "prompt"), special=False)
        return tokens[0] if len(tokens) == 1 else None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The tokens of a prompt, with the special tokens that the model expects around it or without.

        Raises InvalidRequest, or ContextTooLong for text that cannot fit.
        """
        self._check_length(_checked_text(text, "prompt"))
        with self._lock:
            return self._encode(text, special=add_special)

    def encode_truncated(self, text: str) -> list[int]:
        """The tokens of a text for the model, of one that cannot fit those of its beginning: more than fit anyway.

        Raises InvalidRequest.
        """
        # What `_check_length` takes, in whole characters.
        most = 4 * self._max_token_bytes * self._context - 1
        beginning = _checked_text(text, "prompt").encode()[:most].decode(errors="ignore")
        with self._lock:
            return self._encode(beginning, special=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones too; raises InvalidRequest for numbers that are none."""
        known = self._checked_tokens(tokens, "tokens")
        with self._lock:
            text = self._token_bytes.decode(known)
            return detokenize(self._token_bytes, known) if "\ufffd" in text else text

    def describe_tokens(self, tokens: Sequence[int]) -> list[Logprob]:
        """Each token by itself, with its text and its bytes; raises InvalidRequest for numbers that are none."""
        with self._lock:
            return [_describe_token(self._token_bytes, token, 0.0) for token in self._checked_tokens(tokens, "tokens")]

    def encode_prediction(self, text: str) -> list[int]:
        """The tokens of a text that an answer may hold, without special ones around it.

        Raises InvalidRequest for text that no context can hold.
        """
        try:
            self._check_length(_checked_text(text, "prediction"))
            with self._lock:
                tokens = self._encode(text, special=False)
        except ContextTooLong as error:
            raise InvalidRequest("prediction", f"the context of this model holds {self._context} tokens") from error
        if len(tokens) > self._context:
            reason = f"it has {len(tokens)} tokens, and the context of this model holds {self._context}"
            raise InvalidRequest("prediction", reason)
        return tokens

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, object] | None = None,
        breakpoints: Sequence[tuple[int, int]] = (),
    ) -> RenderedPrompt:
        """A conversation in the model's template; `arguments` are handed to the template.

        A special token that stands in a message is read as plain text, so that no message can end its own turn.
        breakpoints  (message, letters): behind so many letters of the content of a message the prompt is marked
        Raises InvalidRequest where the model has no template, or its template refuses the conversation, and
        ContextTooLong for text that cannot fit.
        """
        if not self.has_chat_template:
            raise InvalidRequest("messages", "this model has no chat template; use /v1/completions")
        offers = [_tool_definition(tool) for tool in tools]
        self._check_length(*(_checked_text(text, "messages") for text in _strings([messages, offers])))
        shown, places = self._call_format.convert_messages(messages)
        offers = self._call_format.convert_tools(offers)
        options: dict[str, Any] = {
            **template_variables(self._template_names, offers),
            **(arguments or {}),
            **({"tools": offers} if offers else {}),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        with self._lock:
            try:
                return self._render(shown, options, [(places[at], letters) for at, letters in breakpoints])
            except TEMPLATE_ERRORS as error:
                raise InvalidRequest("messages", f"the model's chat template refuses this: {error}") from error

    def detokenizer(self, prompt: Sequence[int], *, special: bool = False) -> Detokenizer:
        """For the engine thread: turns the tokens that follow `prompt` into text, special ones too or without them."""
        return IncrementalDetokenizer(self._engine_token_bytes, prompt, special=special)

    def describe_token(self, token: int, logprob: float) -> Logprob:
        """For the engine thread: a token with its own text and bytes, as log-probabilities report it."""
        return _describe_token(self._engine_token_bytes, token, logprob)

    def _render_sample(self, messages: Messages, tools: Sequence[Mapping[str, object]]) -> str:
        """What the template makes of a few messages with tools."""
        return self._render_text(
            messages,
            {**template_variables(self._template_names, tools), "tools": list(tools), "add_generation_prompt": True},
        )

    def _render_text(self, messages: Messages, options: dict[str, Any]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def _lexicon(self) -> Vocabulary:
        """What markers are made of; read once, before anybody else uses the tokenizer."""
        known = {str(token): number for token, number in self._tokenizer.get_added_vocab().items()}
        marked = getattr(self._tokenizer, "added_tokens_decoder", {})
        special = (
            number in self.special_tokens or getattr(marked.get(number), "special", False) for number in known.values()
        )
        return Vocabulary(
            added=known,
            special=frozenset(itertools.compress(known, special)),
            encode=lambda text: self._encode(text, special=False),
        )

    def _check_length(self, *texts: str) -> None:
        """Refuse text that has too many tokens however it is cut: to read megabytes takes seconds, for all who wait.

        Normalisers may shorten text (spaces, compatibility forms), so four times the room is given.
        """
        least = sum(len(text.encode()) for text in texts) // (4 * self._max_token_bytes)
        if least >= self._context:
            raise ContextTooLong(least, self._context, exact=False, max_context=self._max_context)

    def _render(
        self, messages: list[dict[str, object]], options: dict[str, Any], breakpoints: Sequence[tuple[int, int]]
    ) -> RenderedPrompt:
        first = {**options, "add_generation_prompt": False, "continue_final_message": False}
        finished = len(messages) - bool(options["continue_final_message"])
        find = functools.partial(outline, messages, finished_messages=finished, breakpoints=breakpoints)
        strings = _strings([messages, options.get("tools")])
        if not self._tokenizer.is_fast or any(token in text for text in strings for token in self._added_tokens):
            tokens = self._checked_tokens(self._render_tokens(messages, options))
            places = find(tokens, lambda some: list(self._render_tokens(some, first)))
            opened = self._token_bytes.decode(places.generation_prompt)
            return RenderedPrompt(
                tuple(tokens), places.system_end or None, places.checkpoints, _optional_range(places.last_user), opened
            )
        text = self._render_text(messages, options)
        read = self._tokenizer(text, add_special_tokens=False, verbose=False)
        found = find(text, lambda some: self._render_text(some, first))
        starts, stops = (_Offsets(read.encodings[0], edge) for edge in (0, 1))
        marks = tuple(bisect_right(stops, end) for end in found.checkpoints)
        protected = [
            (bisect_right(stops, start), bisect_left(starts, stop)) for start, stop in _optional_range(found.last_user)
        ]
        keep = bisect_right(stops, found.system_end) if found.system_end else None
        return RenderedPrompt(
            tuple(self._checked_tokens(read["input_ids"])), keep, marks, tuple(protected), found.generation_prompt
        )

    def _render_tokens(self, messages: Messages, options: dict[str, Any]) -> list[int]:
        """The tokens of a conversation that holds special tokens, which are read as plain text."""
        tokens: list[int] = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=False, sanitize_control_tokens=True, **options
        )
        return tokens

    def _encode(self, text: str, *, special: bool) -> list[int]:
        # transformers calls encode_batch underneath, which lets other threads run; `encode` of the bare tokenizer
        # would hold the interpreter for seconds (measured 4.5 s for 2 M characters).
        return self._checked_tokens(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _checked_tokens(self, tokens: Sequence[int], field: str = "prompt") -> list[int]:
        """The tokens, checked: an embedding row must exist for each, or the whole batch would break."""
        if any(not 0 <= token < self._vocabulary_size for token in tokens):
            raise InvalidRequest(field, f"a token of this model is a number from 0 to {self._vocabulary_size - 1}")
        return list(tokens)


class _Offsets(Sequence[int]):
    """Where tokens begin (edge 0) or end (1) in their text, asked one by one.

    A list of all would hold the interpreter for 0.25 s (400,000 tokens, measured), and a few are wanted.
    """

    def __init__(self, encoding: Any, edge: int) -> None:
        self._encoding, self._edge = encoding, edge

    def __len__(self) -> int:
        return len(self._encoding)

    def __getitem__(self, token: Any) -> Any:
        return self._encoding.token_to_chars(token)[self._edge]


def _template_text(tokenizer: Any) -> str:
    """The chat template, or all of them where there are several."""
    return "\n".join(_templates(tokenizer))


def _templates(tokenizer: Any) -> list[str]:
    template = tokenizer.chat_template
    return list(template.values()) if isinstance(template, Mapping) else [template] if template else []


def _tool_definition(tool: Tool) -> dict[str, object]:
    """A tool as templates expect it."""
    function: dict[str, object] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = json.loads(tool.parameters)
    return {"type": "function", "function": function}


def _describe_token(token_bytes: TokenBytes, token: int, logprob: float) -> Logprob:
    return Logprob(token, token_bytes.token_text(token), token_bytes.token_bytes(token), logprob)


def _optional_range(last_user: tuple[int, int] | None) -> tuple[tuple[int, int], ...]:
    return () if last_user is None else (last_user,)


def _strings(value: object) -> Iterator[str]:
    """Every string inside a message."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _checked_text(text: str, field: str) -> str:
    """The text itself; half a surrogate pair is no text, and tokenizers crash on it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, "the text holds half of a surrogate pair, which is no character") from error
    return text
