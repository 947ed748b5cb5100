"""Pages of lists, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

from typing_extensions import TypedDict

from server.http.errors import ApiError, invalid_value

Item = TypeVar("Item")


class Page(TypedDict, Generic[Item]):
    """A part of a list, with the ids of its ends."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(
    items: Sequence[Item], ids: Sequence[str], limit: int, after: str | None, *, kind: str = "object"
) -> Page[Item]:
    """At most `limit` items after the one with the id `after`; ApiError if no `kind` of the list has this id."""
    if after is not None and after not in ids:
        raise no_such_item(kind)
    start = 0 if after is None else ids.index(after) + 1
    return first_page(items[start:], ids[start:], limit)


def first_page(items: Sequence[Item], ids: Sequence[str], limit: int) -> Page[Item]:
    """The first `limit` items."""
    page_ids = ids[:limit]
    return Page(
        object="list",
        data=list(items[:limit]),
        first_id=page_ids[0] if page_ids else None,
        last_id=page_ids[-1] if page_ids else None,
        has_more=limit < len(items),
    )


def no_such_item(kind: str = "object") -> ApiError:
    """The error for an `after` that is no id of the list."""
    return invalid_value("after", f"there is no {kind} with this id")
