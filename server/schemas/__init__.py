"""The shapes on the wire: requests are pydantic models, answers typed dicts."""
