"""Tokenization and chat templates, for every tokenizer that transformers loads.

Worker threads of the server encode under a lock; the engine thread decodes without one. Tokenizers of the Rust library
(0.23 and later) permit that; of other tokenizers the engine thread has a copy.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import logging
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import mark_control_tokens

from engine.chat_format.detection import AddedVocabulary, ChatFormatSource, chat_format_source, detect_chat_format
from engine.chat_format.message import Tool
from engine.errors import ContextTooLong, InvalidRequest, Overloaded
from engine.text.contents import (
    TEXT_MARK,
    ContentForm,
    ContentProcessor,
    ContentRenderer,
    ProcessedContent,
    detect_form,
    needs_parts,
    process_uploads,
)
from engine.text.detokenizer import Detokenizer, IncrementalDetokenizer, TokenBytes, detokenize
from engine.text.fill_in_middle import detect_fill_in_middle
from engine.text.offsets import TokenOffsets
from engine.text.outline import TEMPLATE_ERRORS, Messages, Outline, outline
from engine.text.regex_limit import RegexLimit
from engine.text.strings import checked_text, strings_in
from engine.text.system_messages import fold_system_messages, has_system_role
from engine.text.template_process import (
    TemplateJob,
    TemplateTooCostly,
    TemplateUnavailable,
    check_size,
    template_processes,
)
from engine.text.tool_call_format import ToolCallFormat, detect_tool_call_format
from engine.text.variables import template_variables
from engine.text.vocabulary import summarize
from engine.types.content import Content, ContentKind, Upload
from engine.types.events import Logprob
from engine.types.request import RenderedPrompt
from engine.watchdog import WatchedLock

# A character that no token combines with others, and its maximum number of tokens with a space before it.
_SEPARATOR, _MAX_SEPARATOR_TOKENS = "\x02", 4
log = logging.getLogger("cellar.engine")
_KIND_NAMES: dict[ContentKind, str] = {"image": "images", "audio": "audio"}
# Of a client with a conversation that cannot be rendered now.
_RETRY_SECONDS = 5.0


class Tokenizer:
    """Encodes prompts and renders conversations for the server; detokenizes for the engine thread.

    context      tokens of a sequence; text that certainly has more is refused before it is tokenized
    max_context  the longest context that the settings could allow, for that error
    chat_format  of reasoning and tool calls in the model's output

    template_names   variables that the chat templates read
    has_system_role  whether the chat template renders system messages; if not, they join the next user message

    Raises TemplateTooCostly, and TemplateUnavailable.
    """

    def __init__(self, tokenizer: Any, *, vocabulary_size: int, context: int, max_context: int = 0) -> None:
        self._tokenizer = tokenizer
        self._context, self._max_context = context, max_context
        vocabulary = summarize(tokenizer.get_vocab())
        self._max_token_bytes, self._tokens = vocabulary.max_token_bytes, vocabulary.size
        self._token_bytes = self._engine_token_bytes = TokenBytes(tokenizer, vocabulary)
        if not getattr(tokenizer, "is_fast", False):
            self._engine_token_bytes = TokenBytes(copy.deepcopy(tokenizer), vocabulary)
        self._lock = WatchedLock()
        self._vocabulary_size = vocabulary_size
        self._added_tokens = tuple(str(token) for token in tokenizer.get_added_vocab())
        self.special_tokens = frozenset(tokenizer.all_special_ids)
        self.eos_tokens = frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
        self.fill_in_middle = detect_fill_in_middle(self._token_id)
        self.template_names: frozenset[str] = frozenset()
        self._call_format, self.has_system_role = ToolCallFormat(), True
        self._contents = ContentRenderer()
        self._content_processor: ContentProcessor | None = None
        if self.has_chat_template:
            self._examine_templates()
        self.chat_format = detect_chat_format(self.template, self._added_vocabulary(), self._response_template)

    def chat_format_source(self) -> ChatFormatSource:
        """The values from which another process detects `chat_format`."""
        return chat_format_source(self.template, self._added_vocabulary(), self._response_template)

    def with_context(self, context: int, max_context: int) -> Tokenizer:
        """Set the context and the maximum context; returns the tokenizer itself."""
        self._context, self._max_context = context, max_context
        return self

    def use_content_processor(
        self, processor: ContentProcessor, markers: Mapping[ContentKind, str]
    ) -> frozenset[ContentKind]:
        """Render images and sounds with a processor; the kinds that the chat template renders.

        markers  those of the processor for the kinds that the model reads

        Raises TemplateTooCostly, and TemplateUnavailable.
        """
        forms: dict[ContentKind, ContentForm] = {}
        if self.has_chat_template:
            with template_processes().job() as job:
                render = functools.partial(self._render_sample, job, tools=())
                detected = {kind: detect_form(kind, marker, render) for kind, marker in markers.items()}
            forms = {kind: form for kind, form in detected.items() if form is not None}
        markers = {kind: markers[kind] for kind in forms}
        if "text" in forms.values():
            log.warning("the chat template reads texts alone: images and sounds stand before the text of a message")
            self._contents = ContentRenderer("text", markers, processor.placeholders)
        else:
            self._contents = ContentRenderer(self._contents.form, markers, processor.placeholders)
        self._content_processor = processor
        return frozenset(forms)

    def is_stuck(self) -> bool:
        """Observe the worker threads; whether one has been in the tokenizer for minutes."""
        return self._lock.is_stuck()

    def pieces(self) -> dict[int, str]:
        """All tokens of the vocabulary by id, as it spells them."""
        return self._pieces_between(0, self.size)

    @property
    def size(self) -> int:
        """The largest id of a token, and 1."""
        return self._tokens

    def token_bytes(self, start: int, stop: int) -> list[bytes]:
        """The bytes of the tokens [start, stop) inside a text, by id; empty for ids without a token. For any thread."""
        return self._engine_token_bytes.all_token_bytes(self._pieces_between(start, stop), start, stop)

    def markers(self) -> list[int]:
        """The ids that are never part of a text: special tokens, and added tokens in angle brackets."""
        added = self._tokenizer.get_added_vocab()
        markers = {token for piece, token in added.items() if piece.startswith("<") and piece.endswith(">")}
        return sorted(markers | self._engine_token_bytes.special_tokens)

    def _pieces_between(self, start: int, stop: int) -> dict[int, str]:
        # One call for the whole vocabulary would hold the interpreter lock for 0.3 s with 262,000 tokens (measured).
        ids = range(start, min(stop, self._tokens))
        return {number: piece for number in ids if (piece := self._piece(number)) is not None}

    @functools.cached_property
    def _piece(self) -> Callable[[int], str | None]:
        """The spelling of a token."""
        if getattr(self._tokenizer, "is_fast", False):
            spell: Callable[[int], str | None] = self._tokenizer.backend_tokenizer.id_to_token
            return spell
        return {number: piece for piece, number in self._tokenizer.get_vocab().items()}.get

    def encode_inside_text(self, text: str) -> list[int]:
        """The tokens of a text inside another text; none if its start merges with the separator. For any thread.

        The separator is encoded first, because a tokenizer may add a space at the start of a text.
        """
        tokens = self._engine_token_bytes.encode(_SEPARATOR + text)
        for count in range(1, min(len(tokens), _MAX_SEPARATOR_TOKENS) + 1):
            if b"".join(map(self._engine_token_bytes.token_bytes, tokens[:count])).strip() == _SEPARATOR.encode():
                return tokens[count:]
        return []

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def template(self) -> str:
        """The source of the chat template, or of all of them if there are several; "" without one."""
        return "\n".join(_templates(self._tokenizer))

    @property
    def _response_template(self) -> Mapping[str, object] | None:
        response: Mapping[str, object] | None = getattr(self._tokenizer, "response_template", None)
        return response

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The tokens of a prompt, with or without special tokens such as BOS.

        Raises InvalidRequest, or ContextTooLong for text that exceeds the context in any tokenization.
        """
        self._check_length(checked_text(text, "prompt"))
        with self._lock:
            return self._encode(text, special=add_special)

    def encode_truncated(self, text: str) -> list[int]:
        """The tokens of a prompt; a long one is truncated, but still exceeds the context. Raises InvalidRequest."""
        # The longest text that `_check_length` accepts.
        limit = 4 * self._max_token_bytes * self._context - 1
        truncated = checked_text(text, "prompt").encode()[:limit].decode(errors="ignore")
        with self._lock:
            return self._encode(truncated, special=True)

    def encode_gap(self, before: str, after: str, files: Sequence[tuple[str, str]] = ()) -> list[int]:
        """The tokens of a prompt for a continuation that fills the gap between two texts.

        files  names and texts of other files: the last ones, in at most half of the context that the texts leave

        Raises InvalidRequest, also for a vocabulary without the tokens for it, or ContextTooLong.
        """
        if self.fill_in_middle is None:
            raise InvalidRequest("suffix", "the vocabulary of this model has no fill-in-the-middle tokens")
        self._check_length(checked_text(before, "prompt"), checked_text(after, "suffix"))
        with self._lock:
            opening = [token for token in self._encode("", special=True) if token == self._tokenizer.bos_token_id]
            prefix, suffix = self._encode(before, special=False), self._encode(after, special=False)
            limit = max(self._context - len(prefix) - len(suffix), 0) // 2
            # No token of a file too long for the limit is needed.
            fitting = [(name, text) for name, text in files if len(text) <= limit * self._max_token_bytes]
            others = self.fill_in_middle.file_tokens(
                fitting, lambda text: self._encode(checked_text(text, "input_extra"), special=False), limit
            )
        # Without the space that some tokenizers add at the start of a text.
        return self.fill_in_middle.prompt(opening, prefix, self.encode_inside_text(after) or suffix, others)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included. Raises InvalidRequest for invalid ids."""
        checked = self._checked_tokens(tokens, "tokens")
        with self._lock:
            text = self._token_bytes.decode(checked)
            return detokenize(self._token_bytes, checked) if "\ufffd" in text else text

    def describe_tokens(self, tokens: Sequence[int]) -> list[Logprob]:
        """Text and bytes of each token alone. Raises InvalidRequest for invalid ids."""
        with self._lock:
            return [_describe_token(self._token_bytes, token, 0.0) for token in self._checked_tokens(tokens, "tokens")]

    def encode_prediction(self, text: str) -> list[int]:
        """The tokens of a predicted output, without special tokens. Raises InvalidRequest if it exceeds the context."""
        try:
            self._check_length(checked_text(text, "prediction"))
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
        uploads: Sequence[Upload] = (),
    ) -> RenderedPrompt:
        """Render a conversation with the chat template. Special tokens in messages are encoded as plain text.

        arguments    further variables of the template
        breakpoints  (message, position): positions in the content of messages that become checkpoints; each image or
                     sound counts as one character
        uploads      files of the parts {"type": "image"} and {"type": "audio"} of messages, in the order of the parts

        Raises InvalidRequest if there is no template, or it refuses the conversation, InvalidContent, and
        ContextTooLong.
        """
        self._check_uploads(uploads)
        if not self.has_chat_template:
            raise InvalidRequest("messages", "this model has no chat template; use /v1/completions")
        definitions = [_tool_definition(tool) for tool in tools]
        self._check_length(*(checked_text(text, "messages") for text in strings_in([messages, definitions])))
        if not self.has_system_role:
            folded = fold_system_messages(messages)
            messages = folded.messages
            breakpoints = [
                (index, start + characters)
                for message, characters in breakpoints
                for index, start in [folded.places[message]]
            ]
        converted, indices = self._call_format.convert_messages(messages)
        definitions = self._call_format.convert_tools(definitions)
        options: dict[str, Any] = {
            **template_variables(self.template_names, definitions),
            **(arguments or {}),
            **({"tools": definitions} if definitions else {}),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        try:
            return self._render(
                converted,
                options,
                [(indices[message], position) for message, position in breakpoints],
                self._process(uploads),
            )
        except TEMPLATE_ERRORS as error:
            raise InvalidRequest("messages", f"the model's chat template refuses this: {error}") from error
        except TemplateTooCostly as error:
            raise InvalidRequest("messages", f"the model's chat template {error}") from error
        except TemplateUnavailable as error:
            raise Overloaded(1, _RETRY_SECONDS) from error

    def detokenizer(self, prompt: Sequence[int], *, special: bool = False) -> Detokenizer:
        """For the engine thread: decodes the tokens after `prompt`, with or without special tokens."""
        return IncrementalDetokenizer(self._engine_token_bytes, prompt, special=special)

    def describe_token(self, token: int, logprob: float) -> Logprob:
        """For the engine thread: text and bytes of a token, with its logprob."""
        return _describe_token(self._engine_token_bytes, token, logprob)

    def _examine_templates(self) -> None:
        """Read the variables of the chat templates and the tool call format that they accept."""
        templates = _templates(self._tokenizer)
        check_size(templates)
        with template_processes().job() as job:
            self.template_names = frozenset().union(*map(job.prepare, templates))
            self._call_format = detect_tool_call_format(functools.partial(self._render_sample, job))
            render = functools.partial(self._render_sample, job, tools=())
            self.has_system_role = has_system_role(render)
            if needs_parts(render):
                self._contents = ContentRenderer("parts")

    def _render_sample(self, job: TemplateJob, messages: Messages, tools: Sequence[Mapping[str, object]]) -> str:
        """Render messages and tools, for the detection of the tool call format."""
        options = {"tools": list(tools), "add_generation_prompt": True}
        return self._render_text(job, messages, {**template_variables(self.template_names, tools), **options})

    def _render_text(self, job: TemplateJob, messages: Messages, options: dict[str, Any]) -> str:
        template = self._tokenizer.get_chat_template(tools=options.get("tools"))
        text = job.render(template, self._contents.arrange(messages), {**self._tokenizer.special_tokens_map, **options})
        self._check_length(text)
        return text

    def _added_vocabulary(self) -> AddedVocabulary:
        """The added tokens, of which markers consist."""
        added = {str(token): number for token, number in self._tokenizer.get_added_vocab().items()}
        decoder = getattr(self._tokenizer, "added_tokens_decoder", {})
        special = (
            number in self.special_tokens or getattr(decoder.get(number), "special", False) for number in added.values()
        )
        return AddedVocabulary(
            added=added,
            special=frozenset(itertools.compress(added, special)),
            encode=lambda text: self._encode(text, special=False),
        )

    def _token_id(self, text: str) -> int | None:
        """The single token that the vocabulary spells as `text`."""
        try:
            token = self._tokenizer.convert_tokens_to_ids(text)
        except (ValueError, KeyError):
            # Of tokenizers in Python without an unknown token.
            return None
        known = isinstance(token, int) and self._tokenizer.convert_ids_to_tokens(token) == text
        return token if known else None

    def _check_length(self, *texts: str) -> None:
        """Raise ContextTooLong for text that exceeds the context in any tokenization: to tokenize it takes seconds.

        Normalisers may shorten text (spaces, compatibility forms), so the limit has a factor of four.
        """
        min_tokens = sum(len(text.encode()) for text in texts) // (4 * self._max_token_bytes)
        if min_tokens >= self._context:
            raise ContextTooLong(min_tokens, self._context, exact=False, max_context=self._max_context)

    def _check_uploads(self, uploads: Sequence[Upload]) -> None:
        """Raise InvalidRequest for an image or a sound that this model does not read."""
        for upload in uploads:
            if upload.kind not in self._contents.markers:
                names = [_KIND_NAMES[kind] for kind in self._contents.markers]
                reason = f"this model reads {' and '.join(('text', *names))} only, no {_KIND_NAMES[upload.kind]}"
                raise InvalidRequest(upload.field, reason)

    def _process(self, uploads: Sequence[Upload]) -> list[ProcessedContent]:
        return process_uploads(self._content_processor, uploads) if self._content_processor else []

    def _render(
        self,
        messages: list[dict[str, object]],
        options: dict[str, Any],
        breakpoints: Sequence[tuple[int, int]],
        contents: Sequence[ProcessedContent],
    ) -> RenderedPrompt:
        partial_options = {**options, "add_generation_prompt": False, "continue_final_message": False}
        finished = len(messages) - bool(options["continue_final_message"])
        find = functools.partial(outline, messages, finished_messages=finished, breakpoints=breakpoints)
        is_marked = not self._tokenizer.is_fast or self._has_added_token([messages, options])
        with template_processes().job() as job:
            render = functools.partial(self._render_marked if is_marked else self._render_text, job)
            text = render(messages, options)
            ordered = self._contents.in_order(text, contents)
            expand = functools.partial(self._contents.expand, ordered=ordered)
            if is_marked:
                tokens = self._encode_marked(expand(text))
                by_token = find(tokens, lambda part: self._encode_marked(expand(render(part, partial_options))))
                return self._prompt_of_tokens(tokens, by_token, ordered)
            by_character = find(expand(text), lambda part: expand(render(part, partial_options)))
        return self._prompt_of_text(expand(text), by_character, ordered)

    def _has_added_token(self, value: object) -> bool:
        """Whether a string in messages or variables contains an added token, which is plain text there, or a mark."""
        return any(token in text for text in strings_in(value) for token in (*self._added_tokens, TEXT_MARK))

    def _prompt_of_tokens(
        self, tokens: list[int], prompt_outline: Outline[list[int]], ordered: Sequence[ProcessedContent]
    ) -> RenderedPrompt:
        return RenderedPrompt(
            tuple(tokens),
            prompt_outline.system_end or None,
            prompt_outline.checkpoints,
            _optional_range(prompt_outline.last_user),
            self._token_bytes.decode(prompt_outline.generation_prompt),
            self._locate(tokens, ordered),
        )

    def _prompt_of_text(
        self, text: str, prompt_outline: Outline[str], ordered: Sequence[ProcessedContent]
    ) -> RenderedPrompt:
        with self._lock, RegexLimit("messages"):
            encoded = self._tokenizer(text, add_special_tokens=False, verbose=False)
        starts, stops = (TokenOffsets(encoded.encodings[0], edge) for edge in (0, 1))
        checkpoints = tuple(bisect_right(stops, end) for end in prompt_outline.checkpoints)
        last_user = _optional_range(prompt_outline.last_user)
        protected = tuple((bisect_right(stops, start), bisect_left(starts, stop)) for start, stop in last_user)
        keep = bisect_right(stops, prompt_outline.system_end) if prompt_outline.system_end else None
        tokens = self._checked_tokens(encoded["input_ids"])
        contents = self._locate(tokens, ordered)
        return RenderedPrompt(tuple(tokens), keep, checkpoints, protected, prompt_outline.generation_prompt, contents)

    def _locate(self, tokens: Sequence[int], ordered: Sequence[ProcessedContent]) -> tuple[Content, ...]:
        if not ordered:
            return ()
        with self._lock:
            return self._contents.locate(tokens, ordered, functools.partial(self._encode, special=False))

    def _render_marked(self, job: TemplateJob, messages: Messages, options: dict[str, Any]) -> str:
        """A conversation where special tokens and markers in messages are marked as plain text.

        As `apply_chat_template` of transformers with `sanitize_control_tokens`.
        """
        template = self._tokenizer.get_chat_template(tools=options.get("tools"))
        control_tokens = {*self._tokenizer._get_control_tokens(template), *self._contents.markers.values()}
        longest_first = sorted(control_tokens, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        return self._render_text(job, mark_control_tokens(messages, pattern), mark_control_tokens(options, pattern))

    def _encode_marked(self, text: str) -> list[int]:
        with self._lock, RegexLimit("messages"):
            encoded = self._tokenizer(text, add_special_tokens=False, sanitize_control_tokens=True)
        return self._checked_tokens(encoded["input_ids"])

    def _encode(self, text: str, *, special: bool) -> list[int]:
        # It calls encode_batch, which releases the GIL; `encode` of the Rust tokenizer would hold it for 4.5 s at 2 M
        # characters (measured).
        with RegexLimit("prompt"):
            encoded = self._tokenizer(text, add_special_tokens=special, verbose=False)
        return self._checked_tokens(encoded["input_ids"])

    def _checked_tokens(self, tokens: Sequence[int], field: str = "prompt") -> list[int]:
        """The tokens, if each has an embedding row; one without would fail its whole batch. Raises InvalidRequest."""
        if any(not 0 <= token < self._vocabulary_size for token in tokens):
            raise InvalidRequest(field, f"token ids of this model are 0 to {self._vocabulary_size - 1}")
        return list(tokens)


def _templates(tokenizer: Any) -> list[str]:
    template = tokenizer.chat_template
    return list(template.values()) if isinstance(template, Mapping) else [template] if template else []


def _tool_definition(tool: Tool) -> dict[str, object]:
    """A tool in the format of OpenAI, which chat templates read."""
    function: dict[str, object] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = json.loads(tool.parameters)
    return {"type": "function", "function": function}


def _describe_token(token_bytes: TokenBytes, token: int, logprob: float) -> Logprob:
    return Logprob(token, token_bytes.token_text(token), token_bytes.token_bytes(token), logprob)


def _optional_range(last_user: tuple[int, int] | None) -> tuple[tuple[int, int], ...]:
    return () if last_user is None else (last_user,)
