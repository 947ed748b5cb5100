"""Builds deploy/monitoring/dashboard.json: `python -m docs.dashboard`.

With the URL of a Prometheus that has scraped a server for a while it draws the main panels into docs/monitoring.png:
`python -m docs.dashboard http://127.0.0.1:9090`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from grafana_foundation_sdk.builders import prometheus, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

ROOT = Path(__file__).parent.parent
PLACE, PICTURE = ROOT / "deploy" / "monitoring" / "dashboard.json", ROOT / "docs" / "monitoring.png"
SELECTION = 'model_name=~"$model_name", instance=~"$instance"'
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
PANEL_HEIGHT, PANEL_WIDTH = 8, 8
# Units of drawn panels.
UNITS = {"s": "seconds", "reqps": "a second", "percentunit": "share"}
# Seconds of the drawn range and between two points.
DRAWN_SECONDS, DRAWN_STEP = 120, 1


@dataclass(frozen=True)
class PanelSpec:
    """One panel.

    queries  PromQL by the name in the legend, with `$selection` for the labels of the chosen servers
    """

    title: str
    description: str
    unit: str
    queries: Mapping[str, str]


def rate(metric: str, by: str = "") -> str:
    """The rate of a counter, summed over the servers."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{$selection}}[$__rate_interval]))"


def quantiles(histogram: str, *shares: float) -> dict[str, str]:
    """Quantiles of a histogram."""
    buckets = rate(f"{histogram}_bucket", "le")
    return {f"p{share * 100:g}": f"histogram_quantile({share}, {buckets})" for share in shares}


def mean(histogram: str) -> str:
    """The mean of a histogram's observations."""
    return ratio(f"{histogram}_sum", f"{histogram}_count")


def ratio(part: str, whole: str, by: str = "") -> str:
    """The ratio of two counters' rates."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def total(metric: str) -> str:
    """The sum of a gauge."""
    return f"sum({metric}{{$selection}})"


ROWS: Mapping[str, tuple[PanelSpec, ...]] = {
    "Traffic": (
        PanelSpec(
            "Requests",
            "Finished generations by reason.",
            "reqps",
            {"{{finish_reason}}": rate("cellar_requests_total", "finish_reason")},
        ),
        PanelSpec(
            "Tokens",
            "Prompt tokens computed and found in the cache, and generated tokens.",
            "none",
            {
                "prompt, computed": " - ".join(
                    map(rate, ("cellar_prompt_tokens_total", "cellar_prompt_tokens_cached_total"))
                ),
                "prompt, cached": rate("cellar_prompt_tokens_cached_total"),
                "generated": rate("cellar_generation_tokens_total"),
            },
        ),
        PanelSpec(
            "HTTP responses",
            "By status; 0 is a client that left before the response.",
            "reqps",
            {"{{status}}": rate("cellar_http_responses_total", "status")},
        ),
    ),
    "Latency": (
        PanelSpec(
            "Time to first token",
            "From admission to the first text.",
            "s",
            quantiles("cellar_time_to_first_token_seconds", 0.5, 0.95, 0.99),
        ),
        PanelSpec(
            "Inter-token latency",
            "Between two tokens of one generation.",
            "s",
            quantiles("cellar_inter_token_latency_seconds", 0.5, 0.95, 0.99),
        ),
        PanelSpec(
            "Parts of a request",
            "Mean times in the queue, in prefill and in decode.",
            "s",
            {
                "queue": mean("cellar_queue_time_seconds"),
                "prefill": mean("cellar_prefill_time_seconds"),
                "decode": mean("cellar_decode_time_seconds"),
                "whole": mean("cellar_e2e_request_latency_seconds"),
            },
        ),
    ),
    "Load": (
        PanelSpec(
            "Requests in the engine",
            "Running and waiting requests, and slots.",
            "none",
            {
                "running": total("cellar_requests_running"),
                "waiting": total("cellar_requests_waiting"),
                "slots": total("cellar_slots"),
            },
        ),
        PanelSpec(
            "KV cache",
            "Cells of running requests, and of cached prefixes, which are evicted when cells run out.",
            "percentunit",
            {
                "running": f"{total('cellar_kv_cache_usage_ratio')} / count(cellar_kv_cache_usage_ratio{{$selection}})",
                "cached": f"{total('cellar_kv_cache_cells_remembered')} / {total('cellar_kv_cache_cells')}",
            },
        ),
        PanelSpec(
            "Batch tokens",
            "Tokens of a forward pass.",
            "none",
            {"mean": mean("cellar_batch_tokens"), **quantiles("cellar_batch_tokens", 0.95)},
        ),
        PanelSpec(
            "Steps", "Share of the time in forward passes.", "percentunit", {"busy": rate("cellar_step_seconds_total")}
        ),
        PanelSpec(
            "Preemptions and shifts",
            "Sequences back in the queue for lack of cells; contexts that were shifted.",
            "ops",
            {"preemptions": rate("cellar_preemptions_total"), "shifts": rate("cellar_context_shifts_total")},
        ),
        PanelSpec(
            "Evicted prefixes",
            "Tokens evicted from the prefix cache, and read back from memory or disk.",
            "none",
            {
                "evicted": rate("cellar_kv_cache_evicted_tokens_total"),
                "loaded": rate("cellar_shelf_loaded_tokens_total"),
            },
        ),
    ),
    "Speculative decoding": (
        PanelSpec(
            "Accepted drafts",
            "Share of the draft tokens, by drafter.",
            "percentunit",
            {"{{drafter}}": ratio("cellar_draft_accepted_tokens_total", "cellar_draft_tokens_total", "drafter")},
        ),
        PanelSpec(
            "Prompt lengths", "Tokens of a prompt.", "none", quantiles("cellar_request_prompt_tokens", 0.5, 0.95)
        ),
        PanelSpec(
            "Answer lengths", "Tokens of an answer.", "none", quantiles("cellar_request_generation_tokens", 0.5, 0.95)
        ),
    ),
    "Process": (
        PanelSpec(
            "Memory",
            "Resident memory.",
            "bytes",
            {"{{instance}}": 'process_resident_memory_bytes{instance=~"$instance"}'},
        ),
        PanelSpec(
            "Processors",
            "Busy processors.",
            "none",
            {"{{instance}}": 'rate(process_cpu_seconds_total{instance=~"$instance"}[$__rate_interval])'},
        ),
        PanelSpec(
            "Open files",
            "Share of the file descriptors.",
            "percentunit",
            {"{{instance}}": 'process_open_fds{instance=~"$instance"} / process_max_fds{instance=~"$instance"}'},
        ),
    ),
}
DRAWN = (
    "Requests",
    "Tokens",
    "Time to first token",
    "Inter-token latency",
    "Parts of a request",
    "Requests in the engine",
    "KV cache",
    "Batch tokens",
    "Accepted drafts",
)


def panels() -> list[PanelSpec]:
    """All panels."""
    return [spec for row in ROWS.values() for spec in row]


def expression(query: str) -> str:
    """The query with the labels that the dashboard's variables select by."""
    return query.replace("$selection", SELECTION)


def as_json() -> str:
    """The dashboard for Grafana's import."""
    dashboard = (
        Dashboard("Cellar")
        .uid("kvcellar")
        .tags(["cellar", "llm"])
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(DatasourceVariable("datasource").type("prometheus"))
        .with_variable(_variable("model_name"))
        .with_variable(_variable("instance"))
    )
    for title, row in ROWS.items():
        dashboard = dashboard.with_row(Row(title))
        for spec in row:
            dashboard = dashboard.with_panel(_panel(spec))
    return JSONEncoder(sort_keys=True, indent=2).encode(dashboard.build()) + "\n"


def draw(url: str) -> None:
    """Draw the main panels of the last minutes."""
    from matplotlib.figure import Figure  # half a second of import, and only needed here

    figure = Figure(figsize=(15, 9), layout="constrained")
    chosen = [spec for spec in panels() if spec.title in DRAWN]
    for axes, spec in zip(figure.subplots(3, 3).flat, chosen, strict=True):
        for legend, query in spec.queries.items():
            for labels, points in _range(url, query):
                name = legend.replace("{{", "{").replace("}}", "}").format(**labels)
                axes.plot([moment - points[-1][0] for moment, _ in points], [value for _, value in points], label=name)
        axes.set_title(f"{spec.title} ({UNITS[spec.unit]})" if spec.unit in UNITS else spec.title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(PICTURE, dpi=90)


def _panel(spec: PanelSpec) -> timeseries.Panel:
    panel = timeseries.Panel().title(spec.title).description(spec.description).unit(spec.unit)
    panel = panel.datasource(SOURCE).min(0).height(PANEL_HEIGHT).span(PANEL_WIDTH)
    for number, (legend, query) in enumerate(spec.queries.items()):
        target = prometheus.Dataquery().expr(expression(query)).legend_format(legend).ref_id(chr(ord("A") + number))
        panel = panel.with_target(target)
    return panel


def _variable(label: str) -> QueryVariable:
    query = f"label_values(cellar_slots, {label})"
    return QueryVariable(label).datasource(SOURCE).query(query).include_all(True).multi(True).all_value(".*")


def _range(url: str, query: str) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
    """Labels and points of each series of a query, over the last minutes."""
    now = time.time()
    text = expression(query).replace("$__rate_interval", "10s").replace("$model_name", ".*").replace("$instance", ".*")
    asked = {"query": text, "start": now - DRAWN_SECONDS, "end": now, "step": DRAWN_STEP}
    result = (
        httpx.get(f"{url}/api/v1/query_range", params=asked, trust_env=False)
        .raise_for_status()
        .json()["data"]["result"]
    )
    return [(series["metric"], [(moment, float(value)) for moment, value in series["values"]]) for series in result]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the Grafana dashboard.")
    parser.add_argument("url", nargs="?", help="of a Prometheus: draw the main panels")
    chosen_url = parser.parse_args().url
    PLACE.write_text(as_json())
    if chosen_url is not None:
        draw(chosen_url)
