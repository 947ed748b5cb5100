"""A browser tab with the page: what a user sees and does, and what must never happen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Locator, Page, Request

# A busy machine starts a renderer in half a minute.
PATIENCE_MS = 60_000
# A schema that keeps even a small model writing.
ENDLESS_SCHEMA = '{"type": "array", "items": {"type": "integer"}, "minItems": 4000}'


class Tab:
    """One tab with a storage of its own.

    expected_statuses  error statuses of answers that the test provokes; Chromium writes them to the console
    """

    def __init__(self, context: Any, address: str) -> None:
        self.address, self.page = address, context.new_page()
        self.expected_statuses: set[str] = set()
        self.polls: list[Request] = []
        self._requests: list[str] = []
        self._errors: list[str] = []
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self._errors.append(str(error)))
        self.page.on("request", self._on_request)
        self.page.goto(address)

    def ready(self) -> Tab:
        """Wait until the model of the server is shown."""
        self.page.locator(".server.ready").wait_for()
        return self

    def problems(self) -> list[str]:
        """Errors in the console, and requests to other hosts."""
        host = urlsplit(self.address).netloc
        foreign = [
            url for url in self._requests if urlsplit(url).scheme.startswith("http") and urlsplit(url).netloc != host
        ]
        return [*foreign, *(error for error in self._errors if not self._is_expected(error))]

    def send(self, text: str) -> None:
        """Write a message and send it by the keyboard."""
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> str:
        """Send a message; the text of the complete answer."""
        count = self.answers.count()
        self.send(text)
        return self.answer(count)

    def answer(self, number: int = -1) -> str:
        """The text of an answer once it is complete."""
        found = self.answers.last if number < 0 else self.answers.nth(number)
        found.locator("footer").wait_for()
        text: str = found.locator("> .markdown").inner_text()
        return text

    def set(self, label: str, text: str) -> None:
        """Fill a field of the settings."""
        self.open_panel("Settings")
        self.page.get_by_label(label, exact=True).fill(text)

    def open_panel(self, name: str) -> None:
        """Show a panel."""
        button = self.page.get_by_role("navigation", name="Panels").get_by_role("button", name=name)
        if button.get_attribute("aria-pressed") != "true":
            button.click()

    def figures(self, number: int = -1) -> Locator:
        """The figures of an answer, unfolded."""
        answer = self.answers.last if number < 0 else self.answers.nth(number)
        folded = answer.locator(".more:not([open]) > summary")
        if folded.count():
            folded.click()
        return answer.locator(".more")

    def button(self, name: str) -> Locator:
        """The last button with a name."""
        return self.page.get_by_role("button", name=name, exact=True).last

    @property
    def answers(self) -> Locator:
        """All answers."""
        return self.page.get_by_role("article", name="Answer")

    @property
    def questions(self) -> Locator:
        """The messages of the user."""
        return self.page.get_by_role("article", name="You")

    @property
    def entries(self) -> list[str]:
        """The titles in the list of conversations."""
        return list(self.page.locator(".entry .title").all_inner_texts())

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        width: int = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return width

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._errors.append(message.text)

    def _on_request(self, request: Request) -> None:
        self._requests.append(request.url)
        if request.url.endswith("/v1/engine"):
            self.polls.append(request)

    def _is_expected(self, error: str) -> bool:
        return "Failed to load resource" in error and any(status in error for status in self.expected_statuses)


def page_of(tab: Tab) -> Page:
    """The page of a tab, with its type."""
    page: Page = tab.page
    return page
