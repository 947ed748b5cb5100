"""/metrics: the engine's numbers, the observations of requests, and a size that requests cannot grow."""

from __future__ import annotations

import re
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from engine.types.events import Delta, Failed, Started
from engine.types.request import Request
from engine.types.status import DraftCounts, EmbeddingCounts, EncoderCounts, Stats
from server.app import create_app
from server.metrics.stats_sum import with_totals
from tests.server.fakes import TIMINGS, FakeEngine, ask, finished, settings

CHAT = "/v1/chat/completions"
# Histograms.
OF_REQUESTS = re.compile(r"(_sum|_count|_created)$")
BODY = {"messages": [{"role": "user", "content": "hi"}]}


def scrape(app: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All samples, by name and labels other than the model's name."""
    text = ask(app, "GET", "/metrics").body.decode()
    return {
        (sample.name, tuple(sorted((key, value) for key, value in sample.labels.items() if key != "model_name"))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_engines_numbers_are_read_at_the_scrape() -> None:
    """Gauges and totals equal engine.stats() at the scrape."""
    engine = FakeEngine(
        numbers=Stats(
            running=2,
            waiting=3,
            slots=4,
            cells_used=64,
            cells_cached=9,
            cells_total=256,
            host_cache_bytes=12,
            disk_cache_bytes=13,
            steps_total=10,
            step_seconds_total=1.5,
            batch_tokens_total=99,
            prompt_tokens_total=70,
            cached_tokens_total=30,
            generated_tokens_total=29,
            context_shifts_total=1,
            preemptions_total=5,
            time_slices_total=23,
            prefix_hits_total=6,
            failed_total=7,
            evicted_tokens_total=15,
            trimmed_tokens_total=16,
            loaded_tokens_total=17,
            written_tokens_total=18,
            adapters=24,
            adapter_bytes=25,
            embedding=EmbeddingCounts(waiting=19, texts_total=20, tokens_total=21, batches_total=22),
        )
    )

    samples = scrape(create_app(engine, settings()))  # type: ignore[arg-type]

    assert {
        "cellar_requests_running": 2,
        "cellar_requests_waiting": 3,
        "cellar_slots": 4,
        "cellar_slots_busy": 2,
        "cellar_kv_cache_usage_ratio": 0.25,
        "cellar_kv_cache_cells_remembered": 9,
        "cellar_kv_cache_cells": 256,
        "cellar_shelf_memory_bytes": 12,
        "cellar_shelf_disk_bytes": 13,
        "cellar_engine_up": 1,
        "cellar_adapters_loaded": 24,
        "cellar_adapters_memory_bytes": 25,
        "cellar_engine_ready": 1,
        "cellar_prompt_tokens_total": 70,
        "cellar_prompt_tokens_cached_total": 30,
        "cellar_generation_tokens_total": 29,
        "cellar_steps_total": 10,
        "cellar_step_seconds_total": 1.5,
        "cellar_step_rows_total": 99,
        "cellar_context_shifts_total": 1,
        "cellar_preemptions_total": 5,
        "cellar_time_slices_total": 23,
        "cellar_prefix_hits_total": 6,
        "cellar_sequences_failed_total": 7,
        "cellar_kv_cache_evicted_tokens_total": 15,
        "cellar_kv_cache_thinned_tokens_total": 16,
        "cellar_shelf_loaded_tokens_total": 17,
        "cellar_shelf_saved_tokens_total": 18,
        "cellar_embedding_texts_waiting": 19,
        "cellar_embedding_texts_total": 20,
        "cellar_embedding_tokens_total": 21,
        "cellar_embedding_batches_total": 22,
        "cellar_embedding_seconds_total": 0,
    } == {
        name: value
        for (name, labels), value in samples.items()
        if name.startswith("cellar_") and not labels and not OF_REQUESTS.search(name)
    }


def test_encodings_are_counted_by_kind() -> None:
    """With those of ended processes; hits by the tier of the cache."""
    now = Stats(encoders=(EncoderCounts("image", 5, 1.5, 4, 2),))
    ended = Stats(encoders=(EncoderCounts("image", 1, 0.5, 1, 1), EncoderCounts("audio", 7, 2.0, 0, 3)))

    samples = scrape(create_app(FakeEngine(numbers=with_totals(now, ended)), settings()))  # type: ignore[arg-type]

    assert {
        ("encodings_total", (("kind", "image"),)): 6,
        ("encodings_total", (("kind", "audio"),)): 7,
        ("seconds_total", (("kind", "image"),)): 2,
        ("seconds_total", (("kind", "audio"),)): 2,
        ("cache_hits_total", (("kind", "image"), ("tier", "memory"))): 5,
        ("cache_hits_total", (("kind", "image"), ("tier", "disk"))): 3,
        ("cache_hits_total", (("kind", "audio"), ("tier", "memory"))): 0,
        ("cache_hits_total", (("kind", "audio"), ("tier", "disk"))): 3,
    } == {
        (name.removeprefix("cellar_encoder_"), labels): value
        for (name, labels), value in samples.items()
        if name.startswith("cellar_encoder_")
    }


def test_drafts_are_counted_by_drafter_and_position() -> None:
    """Drafted and accepted tokens; positions count from 1."""
    counts = (DraftCounts("lookup", (5, 3), (4, 1)), DraftCounts("model", (9, 8), (7, 6)))

    samples = scrape(create_app(FakeEngine(numbers=Stats(drafts=counts)), settings()))  # type: ignore[arg-type]

    for kind, numbers in (("lookup", (5, 4, 3, 1)), ("model", (9, 7, 8, 6))):
        assert numbers == tuple(
            samples[f"cellar_draft_{name}_total", (("drafter", kind), ("position", position))]
            for position in ("1", "2")
            for name in ("tokens", "accepted_tokens")
        )


def test_requests_are_counted_by_finish_reason() -> None:
    """stop, length, error: one each; and their times are observed."""
    ends = iter(["stop", "length", None])

    def script(request: Request) -> Any:
        reason = next(ends)
        yield Started(2, 0, 0)
        yield Delta("a", (1,))
        yield Delta("bc", (2, 3))
        yield Failed("x") if reason is None else finished(request, reason=reason)

    app = create_app(FakeEngine(script), settings())  # type: ignore[arg-type]
    for stream in (False, True, False):
        ask(app, "POST", CHAT, json_body={**BODY, "stream": stream})
    samples = scrape(app)

    for reason in ("stop", "length", "error"):
        assert 1 == samples["cellar_requests_total", (("endpoint", "chat"), ("finish_reason", reason))]
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert 3 == samples[f"cellar_{name}_seconds_count", ()]
    assert 2 == samples["cellar_queue_time_seconds_count", ()]
    assert 2 == samples["cellar_http_responses_total", (("route", CHAT), ("status", "200"))]
    assert 1 == samples["cellar_http_responses_total", (("route", CHAT), ("status", "500"))]


def test_requests_cannot_grow_the_metrics() -> None:
    """Models, paths, methods, users and ids of clients are no labels."""
    app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]

    def trouble(number: int) -> None:
        ask(app, "POST", CHAT, json_body={**BODY, "user": f"u{number}"}, headers={"x-request-id": f"id{number}"})
        ask(app, "POST", CHAT, json_body={**BODY, "model": f"m{number}"})
        ask(app, "GET", f"/v1/models/m{number}")
        ask(app, "GET", f"/path/{number}")
        ask(app, f"M{number}", CHAT)

    trouble(0)
    scrape(app)
    before = scrape(app).keys()
    for number in range(1, 30):
        trouble(number)

    assert before == scrape(app).keys()


def test_two_apps_do_not_share_numbers() -> None:
    """Each has a registry of its own."""
    first, second = (create_app(FakeEngine(), settings()) for _ in range(2))  # type: ignore[arg-type]

    ask(first, "POST", CHAT, json_body=BODY)

    name = ("cellar_requests_total", (("endpoint", "chat"), ("finish_reason", "stop")))
    assert 1 == scrape(first)[name]
    assert name not in scrape(second)


def test_lengths_and_times_of_a_request() -> None:
    """Prompt, answer, queue, prefill and decode, by the names of vLLM too; and the process."""
    app = create_app(FakeEngine(numbers=Stats(batch_sizes=(1, 0, 2, *(0,) * 11))), settings())  # type: ignore[arg-type]
    assert 200 == ask(app, "POST", CHAT, json_body=BODY).status

    samples = scrape(app)

    prompt = samples["cellar_request_prompt_tokens_sum", ()]
    assert prompt > 0
    assert 3 == samples["cellar_request_generation_tokens_sum", ()]
    assert TIMINGS.prompt_seconds == samples["cellar_prefill_time_seconds_sum", ()]
    assert TIMINGS.generation_seconds == samples["cellar_decode_time_seconds_sum", ()]
    engine = (("engine", "0"),)
    assert prompt == samples["vllm:request_prompt_tokens_sum", engine]
    assert TIMINGS.prompt_seconds == samples["vllm:request_prefill_time_seconds_sum", engine]
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert 1 == samples[f"vllm:{name}_seconds_count", engine]
    assert 1 == samples["vllm:request_success_total", (("engine", "0"), ("finished_reason", "stop"))]
    assert 3 == samples["vllm:iteration_tokens_total_bucket", (("engine", "0"), ("le", "4"))]
    assert samples["process_resident_memory_bytes", ()] > 0


def test_every_metric_of_the_model_has_its_name() -> None:
    """The label that dashboards select by."""
    text = ask(create_app(FakeEngine(), settings()), "GET", "/metrics").body.decode()  # type: ignore[arg-type]

    named = [line for line in text.splitlines() if line.startswith(("cellar_", "vllm:"))]
    assert [] == [line for line in named if 'model_name="fake"' not in line]
