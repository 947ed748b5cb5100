"""Log-probabilities in the formats of the APIs."""

from __future__ import annotations

from engine.types.events import Logprob, TokenLogprob
from server.generation.logprobs import LogprobFormat, chat_logprobs


def test_omitted_tokens_have_null_bytes_or_none_in_the_responses_api() -> None:
    """The schema of the Responses API has a list of bytes for every token."""
    omitted, letter = Logprob(5, "<end>", b"<end>", -0.5, in_output=False), Logprob(7, "a", b"a", -1.0)
    entry = TokenLogprob(omitted, (omitted, letter))
    (chat,), (responses,) = (chat_logprobs([entry], *formats)["content"] for formats in ([LogprobFormat(20)], []))

    assert ("<end>", None) == (chat["token"], chat["bytes"])
    assert [None, [97]] == [other["bytes"] for other in chat["top_logprobs"]]
    assert [[], [], [97]] == [one["bytes"] for one in (responses, *responses["top_logprobs"])]
