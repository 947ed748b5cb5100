"""The shipped dashboard and alerts, in a Prometheus that scrapes a server under load."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from bench.prompts import sentence
from tests.e2e.serving import ROOT, serving

FOLDER = ROOT / "deploy" / "monitoring"
PATIENCE_SECONDS = 90.0
# Metrics of the panels in vLLM's public dashboard for Prometheus and Grafana.
VLLM_PANELS = {
    "E2E Request Latency": ("e2e_request_latency_seconds",),
    "Token Throughput": ("prompt_tokens_total", "generation_tokens_total"),
    "Inter Token Latency": ("inter_token_latency_seconds",),
    "Scheduler State": ("num_requests_running", "num_requests_waiting"),
    "Time To First Token Latency": ("time_to_first_token_seconds",),
    "Cache Utilization": ("kv_cache_usage_perc",),
    "Request Prompt Length": ("request_prompt_tokens",),
    "Request Generation Length": ("request_generation_tokens",),
    "Finish Reason": ("request_success_total",),
    "Queue Time": ("request_queue_time_seconds",),
    "Requests Prefill and Decode Time": ("request_prefill_time_seconds", "request_decode_time_seconds"),
    "Max Generation Token in Sequence Group": ("request_max_num_generation_tokens",),
}
# Others that routers and other dashboards read.
VLLM_OTHERS = (
    *("cache_config_info", "num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("iteration_tokens_total", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
    *("spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"),
)
VLLM_METRICS = (*(name for names in VLLM_PANELS.values() for name in names), *VLLM_OTHERS)
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")


def test_the_dashboard_is_generated() -> None:
    """Grafana's own builders make it, so it has their schema."""
    pytest.importorskip("grafana_foundation_sdk")
    from docs.dashboard import as_json

    assert as_json() == (FOLDER / "dashboard.json").read_text()


def test_each_alert_says_what_to_do() -> None:
    """A severity, a summary and a description."""
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]

    assert len(rules) == len({rule["alert"] for rule in rules})
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description"} == rule["annotations"].keys()


def test_the_panels_of_vllm_are_listed() -> None:
    """With their metrics, in the order of the dashboard."""
    page = (ROOT / "docs" / "monitoring.md").read_text()
    rows = [f"| {title} | {', '.join(f'`{name}`' for name in names)} |" for title, names in VLLM_PANELS.items()]

    assert "\n".join(rows) in page
    assert all(f"`{name}`" in page for name in VLLM_OTHERS)


@needs_prometheus
def test_the_alerts_are_valid() -> None:
    subprocess.run(["promtool", "check", "rules", FOLDER / "alerts.yml"], check=True, capture_output=True)


@contextmanager
def prometheus(server: str, folder: Path) -> Iterator[str]:
    """The URL of a Prometheus with the shipped alerts and configuration, which scrapes the server every second."""
    shutil.copy(FOLDER / "alerts.yml", folder)
    configuration = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration["scrape_configs"][0]["static_configs"] = [{"targets": [server.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _answers(f"{url}/-/ready"))
        yield url
    finally:
        process.terminate()
        process.wait(30)


def wait_until(condition: Any) -> None:
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def query(url: str, expression: str) -> list[dict[str, Any]]:
    """The series of an expression now."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, trust_env=False)
    assert 200 == answer.status_code, (expression, answer.text)
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


def has_numbers(series: list[dict[str, Any]]) -> bool:
    """Whether a series has a value other than NaN, which 0 / 0 gives."""
    return any(one["value"][1] != "NaN" for one in series)


def has_series(url: str, name: str) -> bool:
    """Whether there is one of vLLM's metrics for the model, a histogram by its buckets, sum and count."""
    found = query(url, f'{{__name__=~"vllm:{name}(_bucket|_sum|_count)?", model_name="cellar-tiny"}}')
    parts = {one["metric"]["__name__"].removeprefix(f"vllm:{name}") for one in found}
    return parts >= {""} or parts >= {"_bucket", "_sum", "_count"}


def load(server: str, stop: threading.Event) -> None:
    """Requests until the end: some with a shared prefix, some that end at the limit."""
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        number = 0
        while not stop.is_set():
            number += 1
            question = "What is a slot?" if number % 2 else sentence(20, f"{number}")
            client.chat.completions.create(
                model="cellar-tiny", messages=[{"role": "user", "content": question}], max_tokens=48
            )


@pytest.mark.slow
@needs_prometheus
def test_every_panel_has_data_under_load(tmp_path: Path) -> None:
    """Each query of the dashboard, vLLM's names, and all alerts, none of which fires but for what is tried."""
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    expressions = [
        target["expr"].replace("$__rate_interval", "10s").replace("$model_name", ".*").replace("$instance", ".*")
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
    stop = threading.Event()
    with (
        tempfile.TemporaryFile("w") as errors,
        serving(["--context", "256", "--slots", "2", "--threads", "1"], errors) as server,
        prometheus(server, tmp_path) as url,
    ):
        clients = [threading.Thread(target=load, args=(server, stop)) for _ in range(4)]
        for client in clients:
            client.start()
        try:
            wait_until(lambda: query(url, "cellar_draft_accepted_tokens_total > 0"))
            wait_until(lambda: all(has_numbers(query(url, expression)) for expression in expressions))
            missing = [name for name in VLLM_METRICS if not has_series(url, name)]
            health = httpx.get(f"{url}/api/v1/rules", trust_env=False).json()["data"]["groups"][0]["rules"]
        finally:
            stop.set()
            for client in clients:
                client.join()

    assert len(expressions) > 20
    assert [] == missing
    assert 9 == len(health)
    assert {"ok"} == {rule["health"] for rule in health}
    assert {"inactive"} == {rule["state"] for rule in health}


@pytest.mark.slow
@needs_prometheus
def test_a_server_that_is_gone_is_an_alert(tmp_path: Path) -> None:
    """Within seconds it is pending, and it fires after a minute."""
    with prometheus("http://127.0.0.1:9", tmp_path) as url:
        wait_until(lambda: query(url, 'ALERTS{alertname="CellarDown", alertstate="pending"}'))
