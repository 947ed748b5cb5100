"""`truncation: "auto"`: the oldest turns of a conversation are dropped until it fits the context."""

from __future__ import annotations

from engine.errors import ContextTooLong
from server.generation.chat_turn import ChatTurn, prepare_chat
from server.schemas.chat import ChatRequest
from server.service import Service

SYSTEM_ROLES = ("system", "developer")


async def fitting_turn(service: Service, body: ChatRequest, id: str) -> ChatTurn:
    """The turn with the longest end of the conversation that fits; it begins with a user message.

    Leading system messages are kept. ContextTooLong if the last user message alone is too long.
    """
    low, high = 0, len(_cut_positions(body))
    fitting: ChatTurn | None = None
    while low < high:
        middle = (low + high) // 2
        turn = await _attempt(service, _truncated(body, middle), id)
        if turn is None:
            low = middle + 1
        else:
            fitting, high = turn, middle
    return fitting or await prepare_chat(service, _truncated(body, low), id)


async def _attempt(service: Service, body: ChatRequest, id: str) -> ChatTurn | None:
    """The turn, if its prompt leaves space for the answer: the requested length, or a quarter of the context."""
    context = service.engine.info.context
    answer_tokens = min(body.max_completion_tokens or context // 4, context // 2)
    try:
        turn = await prepare_chat(service, body, id)
    except ContextTooLong:
        return None
    return turn if len(turn.requests[0].prompt) + answer_tokens <= context else None


def _cut_positions(body: ChatRequest) -> list[int]:
    """Possible first messages: every user message but the first one."""
    positions = [position for position, message in enumerate(body.messages) if message.role == "user"]
    return positions[1:]


def _truncated(body: ChatRequest, cuts: int) -> ChatRequest:
    """The body without the messages before cut position number `cuts`; 0 drops nothing."""
    if cuts == 0:
        return body
    leading = next((position for position, message in enumerate(body.messages) if message.role not in SYSTEM_ROLES), 0)
    first = _cut_positions(body)[cuts - 1]
    return body.model_copy(update={"messages": [*body.messages[:leading], *body.messages[first:]]})
