"""openai-python 2, which many libraries still build on: the tests of the current client, but for what is new in it."""

from __future__ import annotations

# Found by PYTHONPATH, like `subject`. Version 2 has no decisions.
from current.test_openai import (  # noqa: F401
    client,
    test_chat,
    test_embeddings,
    test_errors,
    test_responses,
    test_responses_structured,
    test_responses_tools,
    test_stream,
    test_streamed_tools,
    test_structured,
    test_tools,
    tools,
)
