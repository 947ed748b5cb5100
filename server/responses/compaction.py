"""/v1/responses/compact: a conversation is replaced by a summary that the served model writes.

The request for the summary is appended to the conversation; later the request and its answer stand in place of the
summarised messages, so roles still alternate for any chat template. System messages are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.generation.chat_turn import ChatTurn
from server.generation.completed_message import CompletedMessage
from server.http.errors import GENERATION_FAILED, ApiError
from server.responses.encrypted_content import encode_content
from server.responses.messages import SUMMARY_PROMPT
from server.responses.partial_items import new_id
from server.responses.task import response_usage
from server.responses.truncation import SYSTEM_ROLES
from server.schemas.response_items import Compaction, CompactionItem
from server.schemas.responses import CompactRequest, ResponseRequest

# A summary takes at most 1 / SUMMARY_SHARE of the context.
SUMMARY_SHARE = 4
SUMMARY_QUESTION = {"type": "message", "role": "user", "content": SUMMARY_PROMPT}


def summary_request(body: CompactRequest, context: int) -> ResponseRequest:
    """The request for the summary, without the conversation."""
    fields = {"model": body.model, "instructions": body.instructions, "prompt_cache_key": body.prompt_cache_key}
    return ResponseRequest.model_validate(
        {**fields, "temperature": 0, "max_output_tokens": max(context // SUMMARY_SHARE, 1)}
    )


def compaction(turn: ChatTurn, items: Sequence[dict[str, Any]], reply: CompletedMessage) -> Compaction:
    """The compacted conversation; ApiError if the model wrote nothing."""
    text = reply.text.strip()
    if not text:
        raise ApiError(GENERATION_FAILED, "The model wrote no summary of this conversation.")
    summary = CompactionItem(id=new_id("cmp"), type="compaction", encrypted_content=encode_content(text))
    system_items = [item for item in items if item["type"] == "message" and item["role"] in SYSTEM_ROLES]
    usage = response_usage(reply.ended.finished, reply.ended.reasoning_tokens, turn.requests[0].contents)
    return Compaction(
        id=turn.id, object="response.compaction", created_at=turn.created, output=[*system_items, summary], usage=usage
    )
