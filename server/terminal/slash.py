"""The /commands of `cellar chat`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.terminal.client import ServerError, model_label
from server.terminal.conversation import ConversationError
from server.terminal.media_files import MediaFileError, data_url

if TYPE_CHECKING:
    from server.terminal.chat import Chat

_RESERVED_FIELDS = ("model", "messages", "stream", "stream_options", "n")


class CommandError(ValueError):
    """A command cannot be done; the text is for the user."""


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command; `argument` is empty for a command without one."""

    name: str
    argument: str
    help: str
    run: Callable[[Chat, str], None]


def run_command(chat: Chat, line: str) -> None:
    """Run a line that begins with a slash. Raises CommandError."""
    name, _, argument = line.partition(" ")
    name = ALIASES.get(name, name)
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None:
        nearest = difflib.get_close_matches(name, [command.name for command in COMMANDS], 1, 0.0)[0]
        raise CommandError(
            f"{name} is not a command; the nearest one is {nearest}, and /help lists all. "
            "A space before / makes it text."
        )
    if argument.strip() and not command.argument:
        raise CommandError(f"{name} takes no argument")
    try:
        command.run(chat, argument.strip())
    except (ConversationError, MediaFileError, ServerError) as error:
        raise CommandError(str(error)) from error


def _help(chat: Chat, _: str) -> None:
    width = max(len(f"{command.name} {command.argument}") for command in COMMANDS)
    for command in COMMANDS:
        chat.note(f"{f'{command.name} {command.argument}':<{width}}  {command.help}")
    chat.note("")
    chat.note('""" begins and ends a message of many lines. A space before / makes it text.')
    chat.note("Ctrl-C stops an answer, Ctrl-D ends the chat.")


def _clear(chat: Chat, _: str) -> None:
    chat.conversation.clear()
    chat.note("A new conversation.")


def _system(chat: Chat, text: str) -> None:
    if text:
        chat.conversation.system = None if text == "none" else text
    chat.note(f"system prompt: {chat.conversation.system or 'none'}")


def _set(chat: Chat, text: str) -> None:
    name, _, value = text.partition(" ")
    parameters = chat.conversation.parameters
    if not name:
        chat.note("\n".join(f"{key} = {json.dumps(parameters[key])}" for key in parameters) or "nothing is set")
        return
    name = name.replace("-", "_")
    _check_parameter(chat, name)
    if value.strip() in ("", "default"):
        parameters.pop(name, None)
    else:
        parameters[name] = _json_or_text(value.strip())
    chat.note(f"{name} = {json.dumps(parameters[name])}" if name in parameters else f"{name}: the default")


def _check_parameter(chat: Chat, name: str) -> None:
    """Raise CommandError for a name that the server does not have, if it lists its parameters."""
    names = [known for known in chat.parameters if known not in _RESERVED_FIELDS]
    if name in _RESERVED_FIELDS:
        raise CommandError(f"{name} is set by the chat itself")
    if names and name not in names:
        nearest = difflib.get_close_matches(name, names, 1, 0.0)[0]
        raise CommandError(f"{name} is no parameter; the nearest one is {nearest}")


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _image(chat: Chat, text: str) -> None:
    entries = chat.served.client.models()
    modalities = next((entry.get("input_modalities") for entry in entries if entry["id"] == chat.model), None)
    # Other servers, and models that are not loaded, do not say what they read.
    if modalities is not None and "image" not in modalities:
        raise CommandError(f"{chat.model} on this server does not read images")
    chat.conversation.images.append(data_url(_path(text)))
    chat.note("The image is sent with the next message.")


def _save(chat: Chat, text: str) -> None:
    path = _path(text) if text or chat.conversation.file is None else chat.conversation.file
    chat.conversation.save(path, chat.model)
    chat.note(f"saved in {path}")


def _load(chat: Chat, text: str) -> None:
    chat.conversation.load(_path(text))
    count = len(chat.conversation.messages)
    chat.note(f"{count} messages of {chat.conversation.file}")


def _path(text: str) -> Path:
    if not text:
        raise CommandError("a file name is missing")
    # Terminals write the name of a dropped file in quotes.
    return Path(text.strip("'\"")).expanduser()


def _retry(chat: Chat, _: str) -> None:
    text = chat.conversation.take_last_user()
    if text is None:
        raise CommandError("there is no message yet")
    chat.answer(text)


def _edit(chat: Chat, _: str) -> None:
    text = chat.conversation.take_last_user()
    if text is None:
        raise CommandError("there is no message yet")
    chat.prefilled = text


def _model(chat: Chat, name: str) -> None:
    entries = chat.served.client.models()
    names = [entry["id"] for entry in entries]
    if name and name not in names:
        raise CommandError(f"the server has no model {name}, only {', '.join(names)}")
    if name:
        chat.use_model(name)
    for entry in entries:
        chat.note(f"{'*' if entry['id'] == chat.model else ' '} {model_label(entry)}")


def _stats(chat: Chat, _: str) -> None:
    for line in chat.statistics():
        chat.note(line)


def _quit(chat: Chat, _: str) -> None:
    raise EOFError


COMMANDS = (
    SlashCommand("/help", "", "This list.", _help),
    SlashCommand("/clear", "", "Begin a new conversation; system prompt and parameters stay.", _clear),
    SlashCommand("/system", "[TEXT]", "Show or set the system prompt; none removes it.", _system),
    SlashCommand("/set", "[NAME VALUE]", "Show or set parameters, as in /set temperature 0.2; default unsets.", _set),
    SlashCommand("/image", "FILE", "Send an image with the next message.", _image),
    SlashCommand("/save", "[FILE]", "Write the conversation to a file.", _save),
    SlashCommand("/load", "FILE", "Continue a saved conversation.", _load),
    SlashCommand("/retry", "", "Answer the last message anew.", _retry),
    SlashCommand("/edit", "", "Edit the last message and send it in place of the old one.", _edit),
    SlashCommand("/model", "[NAME]", "Show the models of the server, or use another one.", _model),
    SlashCommand("/stats", "", "Tokens, speed and use of the context.", _stats),
    SlashCommand("/quit", "", "End the chat.", _quit),
)
# Names of llama.cpp and Ollama.
ALIASES = {"/bye": "/quit", "/exit": "/quit", "/?": "/help"}
FILE_COMMANDS = ("/image", "/save", "/load")
