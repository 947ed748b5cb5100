"""Imports go down: server > engine > kvcache, and inside each package from floor to lower floor."""

from __future__ import annotations

import sys

import pytest

from tests.house.source import Source, imports, sources

# Floors from the ground up, separated by "|". A file imports from lower floors only, never from its own.
FLOORS = {
    "kvcache": """errors spec hadamard encoder | planes | cells rotary component | holes node |
        attention recurrent disk components | shelf | radix entries | prefix | forward | cache""",
    "engine": """errors status types message noise trial kernels.reference kernels.crossing kernels.pages
        kernels.cpu.build prefix sight quantize.stacks draft.passage draft.acceptance draft.lengths draft.levels work |
        cost config lineage
        outline wording scoring kernels.latent kernels.packing native.widening kernels.cpu.native
        quantize.survey
        draft.library embedder.layout dialect.source dialect.lark dialect.quoting grammar history
        filters validity | draft.offer budget kernels.linear | draft.plans draft.depth stopping native.placing
        native.decoder rules
        embedder.head
        embedder.reader dialect.input dialect.json_text dialect.thoughts dialect.schema | text dialect.speech |
        dialect.calls dialect.reader kernels.cpu.linear embedder.embedder | dialect.frame embedder.turns
        dialect.parameters dialect.braces dialect.channels | dialect.tagged | dialect.dialect dialect.formats |
        dialect.finding | hooks tokenizer sampling pooling memory shelf draft.adaptive kernels.choice quantize.layers
        quantize.experts quantize.store folder | quantize.surgery plan recurrence sequence grammars encoding
        draft.drafter native.same native.library telling |
        runner crossing gathering draft.lookup draft.forced draft.seats verify embedder.loading
        native.norm native.description |
        draft.chain speculation slots selftest native.recurring native.states native.chain | native.trace |
        native.attention native.walk native.recurrence | native.mlp | native.experts | native.half |
        native.shape native.drawing | native.runner | native.choosing |
        draft.model scheduler load stream | draft.heads | draft.head | draft.loading step | core | duties | engine""",
    "server": """arguments encoding events version settings metrics schemas.policy database responses.sealed
        bench.options bench.samples bench.recording | errors schemas.content store bench.machine bench.client |
        teller schemas.tools renaming faults bench.target bench.prompts | schemas.structure bench.launch bench.asker |
        schemas.common bench.cells | schemas.errors schemas.chat bench.probe bench.plan
        schemas.completions schemas.models schemas.ollama schemas.capabilities auth limits origins parsing protocol
        banner usage schemas.response_input schemas.anthropic_answer | accounts schemas.responses schemas.response_items
        bench.session
        schemas.embeddings schemas.tokens schemas.decisions schemas.scoring schemas.anthropic | places service
        bench.report
        logprobs routes.documented lenient tools messages structure responses.items responses.history anthropic.blocks
        responses.comparison | ability grammar sampling batch jobs bench.plots responses.writer responses.translation
        responses.archive | generation embeddings labels transcript anthropic.translation bench.command |
        fold sse spacing turn continuation asking comparing | ndjson
        reply tokens decisions scoring diagnostics text_chunks responses.snapshot responses.truncation
        responses.run anthropic.answer | chunks ollama | answering chat completions responses.desk | routes.chat
        routes.completions routes.capabilities routes.embeddings routes.tokens routes.decisions routes.rerank
        routes.score routes.health routes.metrics routes.models routes.ollama routes.responses routes.anthropic | app
        | lifecycle | cli""",
}

# What each package never imports, whatever for.
FOREIGN = {
    "engine": {"server", "fastapi", "pydantic", "starlette", "uvicorn", "sse_starlette", "prometheus_client"},
    "server": {"torch", "transformers", "numpy", "safetensors", "huggingface_hub", "kvcache"},
}
KVCACHE_IMPORTS = {"torch", "numpy", "safetensors", "kvcache", *sys.stdlib_module_names}


def floors(package: str) -> dict[str, int]:
    """The floor of each module of a package."""
    return {
        f"{package}.{name}": number for number, floor in enumerate(FLOORS[package].split("|")) for name in floor.split()
    }


def is_package_file(source: Source) -> bool:
    """Whether a file is an __init__.py, which stands below every floor because it imports nothing."""
    return source.path.name == "__init__.py"


@pytest.mark.parametrize("package", FLOORS)
def test_every_file_has_a_floor(package: str) -> None:
    """A new file gets its place in FLOORS, and a file that is gone loses it."""
    there = {source.name for source in sources(package) if not is_package_file(source)}

    assert set(floors(package)) == there, "write the new file into FLOORS of tests/house/test_floors.py"


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.label)
def test_imports_go_down(source: Source) -> None:
    """A file imports only from floors below its own; an __init__.py imports nothing of ours."""
    own = floors(source.package)
    height = own.get(source.name, 0)
    inside = {name for name in imports(source, types=False) if name.split(".")[0] == source.package}

    assert set() == {name for name in inside if own.get(name, -1) >= height or is_package_file(source)}


@pytest.mark.parametrize("source", sources("kvcache"), ids=lambda source: source.label)
def test_kvcache_imports_torch_numpy_and_the_library(source: Source) -> None:
    """The lowest package knows no request, text or model code."""
    assert set() == {name.split(".")[0] for name in imports(source, types=True)} - KVCACHE_IMPORTS


@pytest.mark.parametrize("source", sources("engine", "server"), ids=lambda source: source.label)
def test_what_is_above_stays_above(source: Source) -> None:
    """The engine knows no HTTP, the server no tensor; not even for an annotation."""
    assert set() == {name.split(".")[0] for name in imports(source, types=True)} & FOREIGN[source.package]
