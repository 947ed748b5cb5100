"""Names of models of the hub that are written as addresses."""

from __future__ import annotations

import re

# The page of a repository, of its main branch, or of one of its files there.
_address = re.compile(
    r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/(?P<name>[^/:?#]+/[^/:?#]+)(?P<tag>:[^/?#]+)?"
    r"(?:/(?:tree|blob|resolve)/main(?:/(?P<file>[^?#]+))?)?/?(?:[?#].*)?",
    re.IGNORECASE,
)


def plain_name(model: str) -> str:
    """`organisation/model`, or with `:tag` if it names a GGUF file, of an address such as hf.co/organisation/model.

    Any other text is returned unchanged.
    """
    match = _address.fullmatch(model)
    if match is None:
        return model
    file = (match["file"] or "").rstrip("/")
    return match["name"] + (f":{file}" if file.lower().endswith(".gguf") else match["tag"] or "")
