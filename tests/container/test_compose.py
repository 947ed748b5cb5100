"""What compose.yaml and docker/Dockerfile must say, key by key. Nothing is built here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.kernels.cache_folder import cache_folder
from server.configuration.options import options
from tests.container.dockerfile import ROOT, last, stage, stages

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVICE = SERVICES["cellar"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("user", "10001:10001"),
        ("read_only", True),
        ("init", True),
        ("cap_drop", ["ALL"]),
        ("security_opt", ["no-new-privileges:true"]),
        ("pids_limit", 512),
        ("mem_limit", "${CELLAR_MEMORY:-8g}"),
        ("ulimits", {"nofile": 4096, "core": 0}),
        ("tmpfs", ["/tmp:size=256m,mode=1777,noexec,nosuid,nodev"]),
        ("volumes", ["models:/models", "shelf:/shelf"]),
        ("stop_grace_period", "45s"),
        ("restart", "on-failure:3"),
        ("logging", {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}}),
    ],
)
def test_the_service_is_hardened(key: str, value: object) -> None:
    """Each limit of the container has exactly the value that was decided."""
    assert value == SERVICE[key]


def test_a_file_of_this_machine_is_mounted_read_only() -> None:
    """The override of the documentation adds a mount, at a place that no volume has."""
    text = (ROOT / "docs" / "docker.md").read_text().partition("## A file of this machine")[2]
    override = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])["services"]["cellar"]
    (mount,) = override["volumes"]
    _, place, mode = mount.split(":")

    assert f"# - {mount}" in (ROOT / "compose.yaml").read_text()
    assert mode == "ro"
    assert place not in {volume.split(":")[1] for volume in SERVICE["volumes"]}
    assert Path(override["environment"]["CELLAR_MODEL"]).parent == Path(place)


@pytest.mark.parametrize("key", ["privileged", "cap_add", "network_mode", "pid", "ipc", "devices", "userns_mode"])
def test_the_service_takes_no_privilege(key: str) -> None:
    """Nothing opens what the hardening closed."""
    assert key not in SERVICE


def test_the_port_is_published_to_this_machine_only() -> None:
    """Without an address Docker would open the port to the network, past the firewall."""
    assert ["127.0.0.1:${CELLAR_PORT:-8000}:8000"] == SERVICE["ports"]


def test_no_secret_has_a_value() -> None:
    """Keys and tokens come from outside."""
    secrets = {name: value for name, value in SERVICE["environment"].items() if re.search("KEY|TOKEN", name)}

    assert {"CELLAR_API_KEY", "HF_TOKEN"} <= secrets.keys()
    assert {None} == set(secrets.values())


def test_every_option_reaches_the_container() -> None:
    """A variable that compose.yaml leaves out is dropped in silence. The address inside is the image's own."""
    variables = {name for option in options() if option.field not in ("host", "port") for name in option.variables}
    named = {name for name in SERVICE["environment"] if name.startswith("CELLAR_")}

    assert variables | {"CELLAR_MODEL"} == named


def test_only_these_options_have_another_default() -> None:
    """Other options keep the default of `cellar serve`: unset in the shell, they stay unset in the container."""
    values = {name: value for name, value in SERVICE["environment"].items() if value is not None}

    assert {"CELLAR_STORE", "CELLAR_INSECURE_NO_AUTH", "CELLAR_ALLOWED_HOST"} == values.keys()


def test_an_open_server_is_named_as_such() -> None:
    """The server binds every address of the container without a key only because the file says so."""
    assert "${CELLAR_INSECURE_NO_AUTH:-1}" == SERVICE["environment"]["CELLAR_INSECURE_NO_AUTH"]


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("USER", SERVICE["user"]),
        ("STOPSIGNAL", "SIGTERM"),
        ("EXPOSE", "8000"),
        ("VOLUME", '["/models"]'),
        ("ENTRYPOINT", '["cellar"]'),
        ("CMD", '["serve"]'),
    ],
)
def test_the_image_has_its_settings(keyword: str, value: str) -> None:
    """Instructions of the last stage."""
    assert value == last(keyword)


@pytest.mark.parametrize(
    "variable",
    [
        "HF_HOME=/models",
        "XDG_CACHE_HOME=/models/cache",
        "HOME=/tmp",
        "PYTHONDONTWRITEBYTECODE=1",
        "HF_HUB_DISABLE_TELEMETRY=1",
        "CELLAR_HOST=0.0.0.0",
    ],
)
def test_the_image_writes_only_to_its_volume(variable: str) -> None:
    """Caches go to the volume, the rest to /tmp, so that the root file system can be read-only."""
    assert variable in last("ENV").split()


def test_quantised_weights_outlive_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache folder lies in a volume of the image and of compose.yaml, and not in /tmp."""
    for variable in last("ENV").split():
        monkeypatch.setenv(*variable.split("=", 1))
    volumes = [Path(volume.partition(":")[2]) for volume in SERVICE["volumes"]]

    for kind in ("weights", "kernels"):
        folder = cache_folder(kind)
        assert any(folder.is_relative_to(volume) for volume in volumes)
        assert any(folder.is_relative_to(volume) for volume in json.loads(last("VOLUME")))


def test_the_health_check_runs_without_a_shell() -> None:
    """The probe is a JSON array, and the script in it is in the image."""
    command = json.loads(last("HEALTHCHECK").partition("CMD")[2])
    copied = [step.rest.split() for step in stage("runtime") if step.keyword == "COPY"]

    assert ["python", "/opt/cellar/healthcheck.py"] == command
    assert ["docker/healthcheck.py", command[1]] in copied


def test_the_image_installs_nothing() -> None:
    """pip, its cache and its settings stay in the stage that is thrown away."""
    runs = [step.rest for step in stage("runtime") if step.keyword == "RUN"]

    assert ["FROM runtime"] == [f"{step.keyword} {step.rest}" for step in stages()[-1]]
    assert not [run for run in runs if re.search(r"\b(pip|apt|curl|wget)\b", run)]


def test_the_service_for_gpus_is_hardened_alike() -> None:
    """It differs in its image, its device and the limit of its memory."""
    service = SERVICES["gpu"]
    differing = {key for key in SERVICE.keys() | service.keys() if SERVICE.get(key) != service.get(key)}

    assert {"build", "environment", "gpus", "image", "mem_limit", "profiles"} == differing
    assert "cuda" == service["build"]["target"]
    assert {**SERVICE["environment"], "CELLAR_DEVICE": "${CELLAR_DEVICE:-cuda}"} == service["environment"]
    assert "10001:10001" == [step.rest for step in stage("cuda") if step.keyword == "USER"][-1]


def test_the_build_sees_only_what_is_named() -> None:
    """The context starts empty, so no key, cache or checkout folder slips into a layer."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]

    assert "*" == rules[0]
    assert {"!server", "!bench", "!engine", "!kvcache", "!models/target", "!models/draft"} <= set(rules)


def test_grace_is_longer_than_the_server_waits() -> None:
    """Docker kills only after the server has given up on running answers by itself."""
    from server.configuration.settings import Settings

    assert float(SERVICE["stop_grace_period"].removesuffix("s")) > Settings().grace_seconds


REPLICAS = ("replica-1", "replica-2")


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_are_hardened_like_the_server(name: str) -> None:
    """They differ in their store, host names, time of the first load, and in that only the router has a port."""
    replica = SERVICES[name]
    own = {"profiles", "environment", "ports", "networks", "depends_on", "healthcheck"}

    assert {key: value for key, value in SERVICE.items() if key not in own} == {
        key: value for key, value in replica.items() if key not in own
    }
    assert [] == replica["ports"]
    assert SERVICE["environment"].keys() == replica["environment"].keys()
    assert set(REPLICAS) == set(replica["environment"]["CELLAR_ALLOWED_HOST"].split())
    assert "postgresql://" in replica["environment"]["CELLAR_STORE"]


def test_the_router_knows_the_replicas_and_publishes_to_this_machine_only() -> None:
    router = SERVICES["router"]

    assert [f"http://{name}:8000" for name in REPLICAS] == re.findall(r"http://\S+", router["command"])
    assert SERVICE["ports"] == router["ports"]
    assert ["ALL"] == router["cap_drop"]


def test_the_database_is_for_the_replicas_alone() -> None:
    """It asks for no password, in a network without the router and without the world outside."""
    inside = {name for name, service in SERVICES.items() if "store" in service.get("networks", [])}

    assert {*REPLICAS, "store"} == inside
    assert "ports" not in SERVICES["store"]
    assert COMPOSE["networks"]["store"]["internal"]


def test_the_profile_is_no_part_of_the_default() -> None:
    assert {"cellar"} == {name for name, service in SERVICES.items() if "profiles" not in service}


def images() -> list[str]:
    """Images that are not built here: those of services, and those that inline files begin with."""
    built = [service["build"] for service in SERVICES.values() if "build" in service]
    inline = "\n".join(each.get("dockerfile_inline", "") for each in built)
    named = [service["image"] for service in SERVICES.values() if "build" not in service]
    return [*named, *re.findall(r"^FROM (\S+)", inline, re.MULTILINE)]


@pytest.mark.parametrize("image", sorted(set(images())))
def test_images_of_others_have_a_version(image: str) -> None:
    """Tags without a minor version change what a pull installs."""
    assert re.fullmatch(r"[a-z0-9/]+:v?[0-9]+\.[0-9]+[a-z0-9.-]*", image)


def test_services_wait_for_health_checks_that_exist() -> None:
    """In compose.yaml, or in the image: Compose refuses to wait for a service without one."""
    waited = [
        (name, condition["condition"])
        for service in SERVICES.values()
        for name, condition in service.get("depends_on", {}).items()
    ]

    assert {"store", "replica-1", "replica-2"} == {name for name, _ in waited}
    assert {"service_healthy"} == {condition for _, condition in waited}
    assert last("HEALTHCHECK")
    for name, _ in waited:
        build = SERVICES[name].get("build", {})
        assert "healthcheck" in SERVICES[name] or build.get("dockerfile") == "docker/Dockerfile"


def test_the_replicas_share_a_store_that_only_they_reach() -> None:
    """It has no password."""
    inside = {name for name, service in SERVICES.items() if "store" in service.get("networks", ())}

    assert {"store", "replica-1", "replica-2"} == inside
    assert COMPOSE["networks"]["store"]["internal"]
    assert "ports" not in SERVICES["store"]
    assert [] == [port for name in ("replica-1", "replica-2") for port in SERVICES[name]["ports"]]
