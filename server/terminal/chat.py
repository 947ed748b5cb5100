"""The loop of `cellar chat`: a message, its streamed answer, its figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.text import Text

from server.terminal.client import ServerError
from server.terminal.connection import ServedModel
from server.terminal.conversation import Conversation
from server.terminal.line_input import LineInput, hidden_typing
from server.terminal.printable import printable
from server.terminal.screen import AnswerFigures, AnswerScreen
from server.terminal.slash import COMMANDS, FILE_COMMANDS, CommandError, run_command

PATH = "/v1/chat/completions"


class Chat:
    """A chat with a model on a terminal.

    prefilled   text of the next input line, to be edited
    parameters  names of the server's parameters; empty if unknown
    """

    def __init__(self, served: ServedModel, conversation: Conversation, console: Console) -> None:
        self.served, self.conversation, self.console = served, conversation, console
        self.model, self.prefilled = served.name, ""
        capabilities = served.client.capabilities(self.model)
        self.parameters = _parameter_names(capabilities)
        self._demonstration = (capabilities.get("model") or {}).get("demonstration") or {}
        self._input = LineInput([command.name for command in COMMANDS], FILE_COMMANDS)
        self._answers: list[AnswerFigures] = []

    def run(self) -> None:
        """Read messages and answer them until the end of the input."""
        place = f" at {self.served.client.url}" if self.served.log is None else ""
        self.note(f"{self.model}{place}; /help lists the commands, Ctrl-D ends the chat")
        if self._demonstration:
            self.note(f"This is {self._demonstration['text']}. Others that fit this machine, downloaded once:")
            for model in self._demonstration["models"]:
                self.note(f"  cellar chat {model['name']}  ({model['text']})")
        while True:
            try:
                self._take_turn()
            except KeyboardInterrupt:
                self.console.print()
                self.note("Ctrl-D or /quit ends the chat.")
            except EOFError:
                self.console.print()
                return

    def _take_turn(self) -> None:
        prefilled, self.prefilled = self.prefilled, ""
        line = self._input.read(prefilled)
        if not line.strip():
            return
        if not line.startswith("/"):
            self.answer(line.strip())
            return
        try:
            run_command(self, line.strip())
        except CommandError as error:
            self.console.print(Text(str(error), style="yellow"))

    def answer(self, text: str) -> None:
        """Send a message and show its answer. Ctrl-C ends the answer; its text so far stays in the conversation."""
        self.conversation.add_user(text)
        figures, stopped = AnswerFigures(), False
        body = self.conversation.body(self.model)
        pieces = self.served.client.stream(PATH, body, lambda phase: self.note(f"{self.model}: {phase}"))
        screen = AnswerScreen(self.console)
        try:
            with hidden_typing(), screen, closing(pieces):
                for piece in pieces:
                    figures.add(piece)
                    screen.add(piece)
        except KeyboardInterrupt:
            stopped = True
        except ServerError as error:
            self._refused(error)
            return
        self.conversation.add_answer(screen.text)
        self._answers.append(figures)
        self.note(figures.line() + (", stopped" if stopped else ""))

    def _refused(self, error: ServerError) -> None:
        """Show an error and take back the message."""
        self.console.print(Text(self.served.explain(error), style="red"))
        self.note("Arrow up brings the message back.")
        self.conversation.take_last_user()

    def note(self, text: str) -> None:
        """Show a line of the chat itself."""
        self.console.print(Text(printable(text), style="dim"), soft_wrap=True)

    def use_model(self, name: str) -> None:
        """Send the next messages to another model. Raises ServerError."""
        self.model, self.parameters = name, _parameter_names(self.served.client.capabilities(name))

    def statistics(self) -> Iterator[str]:
        """Totals of the answers, and the use of the context."""
        prompts = sum(int(figures.usage.get("prompt_tokens") or 0) for figures in self._answers)
        yield f"answers    {len(self._answers)}"
        yield f"tokens     {prompts} of prompts, {sum(figures.tokens for figures in self._answers)} of answers"
        speeds = [speed for figures in self._answers if (speed := figures.tokens_per_second)]
        if speeds:
            yield f"speed      {sum(speeds) / len(speeds):.1f} tokens/s on average"
        # A stopped answer has no usage.
        used = next(filter(None, (figures.usage.get("total_tokens") for figures in self._answers[::-1])), None)
        if used:
            yield f"context    {used} tokens" + (f" of {self.served.context}" if self.served.context else "")


def _parameter_names(capabilities: dict[str, Any]) -> tuple[str, ...]:
    endpoint = (capabilities.get("endpoints") or {}).get(PATH) or {}
    return tuple(endpoint.get("parameters") or ())
