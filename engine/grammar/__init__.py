"""Grammars: compiled in a sandbox, matched token by token."""
