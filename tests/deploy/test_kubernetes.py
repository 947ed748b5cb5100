"""The manifests of deploy/kubernetes: their schemas, and what they promise about probes, shutdown and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from server.configuration.options import options
from server.http.auth import OPEN_PATHS
from tests.container.dockerfile import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
# Custom resources, whose schemas are in no package.
CUSTOM = {"InferencePool", "HTTPRoute"}


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def find(kind: str, file: str = "cellar.yaml") -> dict[str, Any]:
    return next(each for each in documents(FOLDER / file) if each["kind"] == kind)


def container() -> dict[str, Any]:
    found: dict[str, Any] = find("Deployment")["spec"]["template"]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_manifests_have_the_schema_of_kubernetes(file: Path) -> None:
    """Without unknown fields."""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, of the extra dev")
    for each in documents(file):
        if each["kind"] not in CUSTOM:
            kubernetes.validate(each, "1.31", strict=True)


def test_the_pool_has_the_fields_of_its_definition() -> None:
    """InferencePool of inference.networking.k8s.io/v1."""
    pool = find("InferencePool", "inference-pool.yaml")

    assert {"selector", "targetPorts", "endpointPickerRef"} == pool["spec"].keys()
    assert {"name", "port", "failureMode"} == pool["spec"]["endpointPickerRef"].keys()
    assert pool["spec"]["endpointPickerRef"]["failureMode"] in ("FailOpen", "FailClose")


def test_all_select_the_pods_of_the_deployment() -> None:
    labels = find("Deployment")["spec"]["template"]["metadata"]["labels"]

    assert labels == find("Deployment")["spec"]["selector"]["matchLabels"]
    assert labels == find("Service")["spec"]["selector"]
    assert labels == find("PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
    assert labels == find("InferencePool", "inference-pool.yaml")["spec"]["selector"]["matchLabels"]


def test_ports_agree() -> None:
    port = container()["ports"][0]

    assert {"name": "http", "containerPort": 8000} == port
    assert port["name"] == find("Service")["spec"]["ports"][0]["targetPort"]
    assert [{"number": 8000}] == find("InferencePool", "inference-pool.yaml")["spec"]["targetPorts"]


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_need_no_key(probe: str) -> None:
    """/health stays 200 while the model loads and while requests drain: a restart would not help."""
    path = container()[probe]["httpGet"]["path"]

    assert path in OPEN_PATHS
    assert ("/health" if probe == "livenessProbe" else "/ready") == path


def test_prometheus_has_a_key_for_the_metrics() -> None:
    """Annotations cannot give it one; the job of the documentation does, for the pods of the Deployment."""
    template = find("Deployment")["spec"]["template"]["metadata"]
    text = (ROOT / "docs" / "monitoring.md").read_text()
    (job,) = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])["scrape_configs"]
    kept = {rule["source_labels"][0]: rule["regex"] for rule in job["relabel_configs"]}

    assert "/metrics" not in OPEN_PATHS
    assert "annotations" not in template
    assert "credentials_file" in job["authorization"]
    assert template["labels"]["app"] == kept["__meta_kubernetes_pod_label_app"]
    assert container()["ports"][0]["name"] == kept["__meta_kubernetes_pod_container_port_name"]


def test_pods_live_longer_than_their_requests() -> None:
    pod = find("Deployment")["spec"]["template"]["spec"]
    grace = next(float(each["value"]) for each in container()["env"] if each["name"] == "CELLAR_GRACE")

    assert grace + 10 < pod["terminationGracePeriodSeconds"]


def test_variables_are_options_and_service_links_are_none() -> None:
    """A Service named cellar would set CELLAR_PORT."""
    names = {each["name"] for each in container()["env"]}

    assert names <= {variable for option in options() for variable in option.variables}
    assert find("Deployment")["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_the_container_is_restricted() -> None:
    security = container()["securityContext"]

    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert ["ALL"] == security["capabilities"]["drop"]
    assert find("Deployment")["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]
