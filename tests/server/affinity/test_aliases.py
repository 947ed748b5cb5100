"""Further keys of conversations."""

from __future__ import annotations

from server.affinity.aliases import ConversationAliases


def test_the_least_recent_aliases_are_dropped() -> None:
    """A key that is used stays, and one that is added again has its last conversation."""
    aliases = ConversationAliases(limit=2)
    aliases.add("a", "first")
    aliases.add("b", "second")
    assert "first" == aliases.resolve("a")
    aliases.add("c", "third")
    aliases.add("c", "fourth")

    assert ["first", "b", "fourth"] == [aliases.resolve(key) for key in ("a", "b", "c")]
    assert 2 == len(aliases)
