"""Stored responses: their bodies, events, conversation history and single items."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import anyio.to_thread
from pydantic import TypeAdapter

from server.http.encoding import dumps
from server.http.errors import PREVIOUS_RESPONSE_NOT_FOUND, ApiError, invalid_value
from server.media.uploads import MediaReader
from server.responses.fork import OutputTokens
from server.responses.partial_items import new_id
from server.schemas.media import InlineMedia
from server.schemas.response_input import Input, InputItem, ReferenceInput
from server.schemas.response_items import ResponseBody
from server.schemas.responses import plain
from server.store.store import MAX_HISTORY, Record, ResponseStore

Item = dict[str, Any]

INPUT_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}
WORKER_LOST = "The server that generated this response stopped."
NOT_STORED = (
    "The response could not be stored, since the store is full, broken or unreachable: it cannot be read again."
)


# The field of a stored body that no client gets.
_OUTPUT_TOKENS = "output_tokens"


class ForkSource(NamedTuple):
    """A stored response with its input items, without earlier ones, and its tokens, if they are stored."""

    response: ResponseBody
    input_items: list[Item]
    output: OutputTokens | None


class Archive:
    """The stored responses of `owner`."""

    def __init__(self, store: ResponseStore, owner: str = "") -> None:
        self._store, self._owner = store, owner

    async def save(
        self,
        response: ResponseBody,
        input_items: Sequence[Item],
        frames: Sequence[bytes],
        *,
        final: bool,
        new: bool = True,
        output: OutputTokens | None = None,
    ) -> None:
        """Store a response with its input items and event frames; a final record is not replaced.

        new     also store it if it is not stored yet
        output  the tokens from which others may continue
        """
        # Only ids of this server: ids of clients may be ambiguous.
        items = [item["id"] for item in response["output"]]
        tokens = None if output is None else output.as_json()
        body = dumps(response if tokens is None else {**response, _OUTPUT_TOKENS: tokens})
        input = dumps(list(input_items))
        previous = response["previous_response_id"]
        cancelled = response["status"] == "cancelled"
        record = Record(
            response["id"], previous, final, body, input, tuple(items), owner=self._owner, cancelled=cancelled
        )
        await self._store.put(record, b"".join(frames), new=new)

    async def response(self, id: str) -> ResponseBody | None:
        """The response as stored; failed if its lease has expired."""
        record = await self._store.get(id, self._owner)
        return None if record is None else _record_body(record)

    async def fork_source(self, id: str) -> ForkSource | None:
        """What another response continues; None: there is no such response."""
        record = await self._store.get(id, self._owner)
        if record is None:
            return None
        tokens = json.loads(record.body).get(_OUTPUT_TOKENS)
        output = None if tokens is None else OutputTokens.from_json(tokens)
        return ForkSource(_record_body(record), record_input(record), output)

    async def frames(self, id: str) -> list[bytes]:
        """The event frames of a response, in order."""
        return [frame + b"\n\n" for frame in (await self._store.events(id, self._owner)).split(b"\n\n") if frame]

    async def cancel(self, id: str) -> ResponseBody | None:
        """Store a response as cancelled unless it is final; None: there is no such response.

        The server that generates it finds that at its next renewal of the lease, and adds the output so far.
        """
        record = await self._store.get(id, self._owner)
        if record is None or record.final or record.lease_expired:
            return None if record is None else _record_body(record)
        response: ResponseBody = {**_record_body(record), "status": "cancelled"}
        await self._store.cancel(id, self._owner, dumps(response))
        return await self.response(id)

    async def delete(self, id: str) -> bool:
        """Delete a response; False: there was none."""
        return await self._store.delete(id, self._owner)

    async def renew_lease(self, id: str) -> bool:
        """Renew the lease of a response in progress; False: it was cancelled or deleted."""
        return bool(await self._store.renew_leases([id]))

    async def history(self, id: str) -> list[Item]:
        """All input and output items up to the end of a response; ApiError if a part is missing or in progress."""
        records = await self._store.history(id, self._owner)
        if not records:
            raise previous_not_found(id)
        if len(records) > MAX_HISTORY:
            reason = f"its conversation has more than {MAX_HISTORY} responses; send them as input"
            raise invalid_value("previous_response_id", reason)
        if records[0].previous is not None:
            raise _previous_error(f"Previous response with id '{id}' continues a response that is no longer stored.")
        if not all(record.final for record in records):
            raise _previous_error(f"Previous response with id '{id}' is not finished.")
        return await anyio.to_thread.run_sync(
            lambda: [item for record in records for item in (*record_input(record), *_record_output(record))]
        )

    async def input_items(self, id: str) -> list[Item] | None:
        """All items in front of a response's output, oldest first; None: there is no such response."""
        record = await self._store.get(id, self._owner)
        if record is None:
            return None
        before = [] if record.previous is None else await self.history(record.previous)
        return [*before, *record_input(record)]

    async def resolve_references(self, input: Sequence[InputItem]) -> list[Item]:
        """The items with item references replaced by stored items; ApiError for an unknown id."""
        names = [item.id for item in input if isinstance(item, ReferenceInput)]
        stored = {
            item["id"]: item
            for record in await self._store.find_by_items(names, self._owner)
            for item in _record_output(record)
        }
        for name in names:
            if name not in stored:
                raise invalid_value("input", f"there is no stored item with the id '{name}'")
        return [stored[item.id] if isinstance(item, ReferenceInput) else stored_item(item) for item in input]


def as_items(input: Input | None) -> Sequence[InputItem]:
    """The input of a request as items."""
    if not isinstance(input, str):
        return input or ()
    return INPUT_ITEMS.validate_python([{"type": "message", "role": "user", "content": input}])


def parse_items(items: Sequence[Item]) -> list[InputItem]:
    """Stored items as request items."""
    return INPUT_ITEMS.validate_python(items)


def stored_item(item: InputItem) -> Item:
    """An item as stored and listed: with an id, its text as content parts."""
    fields = plain(item)
    content = fields.get("content")
    if isinstance(content, str):
        by_assistant = fields.get("role") == "assistant"
        fields["content"] = [_output_text(content) if by_assistant else {"type": "input_text", "text": content}]
    if fields["type"] == "reasoning":
        fields.setdefault("summary", [])
    return {"id": new_id(ID_PREFIXES[fields["type"]]), "status": "completed", **fields}


async def files_of(parts: object, media: MediaReader) -> object:
    """The parts of a stored item with the ids of files in place of inline images and sounds."""
    return [await _file_of(part, media) for part in parts] if isinstance(parts, list) else parts


async def _file_of(part: Item, media: MediaReader) -> Item:
    match part:
        case {"image_url": InlineMedia() as inline}:
            kept = {name: value for name, value in part.items() if name != "image_url"}
            return {**kept, "file_id": await media.keep(inline), "detail": part.get("detail", "auto")}
        case {"input_audio": {"data": InlineMedia() as inline}}:
            return {"type": "input_file", "file_id": await media.keep(inline)}
    return part


def check_call_outputs(items: Sequence[Item]) -> None:
    """Raise ApiError for the output of a tool call that no earlier item contains."""
    calls: set[object] = set()
    for item in items:
        if item["type"] in ("function_call", "custom_tool_call"):
            calls.add(item["call_id"])
        elif item["type"].endswith("_call_output") and item["call_id"] not in calls:
            raise invalid_value("input", f"no tool call found for the output with call_id '{item['call_id']}'")


def previous_not_found(id: str) -> ApiError:
    """The error for a previous response that is not stored."""
    return _previous_error(f"Previous response with id '{id[:128]}' not found.")


def record_input(record: Record) -> list[Item]:
    """The input items of a record, without items of its previous response."""
    return cast(list[Item], json.loads(record.input))


def _record_output(record: Record) -> list[Item]:
    return cast(list[Item], _record_body(record)["output"])


def _output_text(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _record_body(record: Record) -> ResponseBody:
    stored = json.loads(record.body)
    stored.pop(_OUTPUT_TOKENS, None)
    body = cast(ResponseBody, stored)
    return failed_response(body, WORKER_LOST) if record.lease_expired else body


def failed_response(response: ResponseBody, reason: str) -> ResponseBody:
    """The response as failed, without output."""
    error = {"code": "server_error", "message": reason}
    return cast(ResponseBody, {**response, "status": "failed", "output": [], "error": error})


def _previous_error(message: str) -> ApiError:
    return ApiError(PREVIOUS_RESPONSE_NOT_FOUND, message, param="previous_response_id")
