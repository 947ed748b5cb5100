"""The pod of deploy/kubernetes/cellar.yaml under crun, with the work of the kubelet: volumes, a Secret, a network
namespace, limits, probes, and the end of the pod.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.container.dockerfile import ROOT
from tests.container.network import Network, pod_network

MANIFEST = ROOT / "deploy/kubernetes/cellar.yaml"
NAME = "cellar-7d4b9c6f5-x2x4k"
# The kubelet's defaults of a probe.
PROBE = {"periodSeconds": 10, "timeoutSeconds": 1, "failureThreshold": 3}
# Of the pods of this process.
NUMBERS = itertools.count()
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "m": 1e-3, "": 1}


def load_script() -> Any:
    """docker/run-without-docker.py as a module."""
    found = importlib.util.spec_from_file_location("run_without_docker", ROOT / "docker/run-without-docker.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


SCRIPT = load_script()


def pod_template() -> dict[str, Any]:
    """The pod of the Deployment."""
    documents = yaml.safe_load_all(MANIFEST.read_text())
    deployment = next(each for each in documents if each["kind"] == "Deployment")
    pod: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return pod


def quantity(text: str) -> float:
    """A quantity of Kubernetes, such as 4Gi or 250m."""
    number = text.rstrip("KMGim")
    return float(number) * UNITS[text[len(number) :]]


@dataclass
class Pod:
    """A running pod.

    manifest  its specification
    runner    the process that started it
    server    its first process
    bundle    folder of its OCI runtime configuration
    probed    status of each probe by name, newest last
    """

    manifest: dict[str, Any]
    address: str
    name: str
    runner: subprocess.Popen[bytes]
    server: psutil.Process
    bundle: Path
    log: Path
    probed: dict[str, list[int]] = field(default_factory=dict)

    @property
    def container(self) -> dict[str, Any]:
        """Its only container."""
        [container] = self.manifest["containers"]
        return dict(container)

    @property
    def url(self) -> str:
        """Address of its API, by IP."""
        return f"http://{self.address}:{self.container['ports'][0]['containerPort']}"

    def probe(self, name: str) -> int:
        """The status of a probe, as the kubelet sends it; 0 after its timeout."""
        probe = {**PROBE, **self.container[name]}
        headers = {"User-Agent": "kube-probe/1.31", "Accept": "*/*", "Connection": "close"}
        try:
            status = httpx.get(
                f"{self.url}{probe['httpGet']['path']}",
                headers=headers,
                timeout=probe["timeoutSeconds"],
                trust_env=False,
            ).status_code
        except httpx.TransportError:
            status = 0
        self.probed.setdefault(name, []).append(status)
        return status

    def wait_until_started(self) -> None:
        """Return when the startup probe succeeds, within its period and threshold."""
        probe = {**PROBE, **self.container["startupProbe"]}
        for _ in range(probe["failureThreshold"]):
            if self.probe("startupProbe") == 200:
                return
            assert self.runner.poll() is None, self.log.read_text()
            time.sleep(probe["periodSeconds"])
        raise AssertionError(self.log.read_text())

    def execute(self, *command: str) -> str:
        """The output of a command in the container, as of `kubectl exec`: with the user and limits of the server."""
        process = json.loads((self.bundle / "config.json").read_text())["process"]
        (self.bundle / "process.json").write_text(json.dumps({**process, "args": command}))
        script = [*SCRIPT.crun(SCRIPT.image_store()), "exec", "--process", self.bundle / "process.json", self.name]
        done = subprocess.run(script, check=False, capture_output=True, text=True, timeout=120)
        assert 0 == done.returncode, done.stderr
        return done.stdout

    def stop(self, while_ending: Callable[[], None] = lambda: None) -> tuple[int, float]:
        """Exit status and seconds to the end: preStop, SIGTERM, and SIGKILL after terminationGracePeriodSeconds.

        `while_ending` is called every half second after SIGTERM.
        """
        begun = time.monotonic()
        self.execute(*self.container["lifecycle"]["preStop"]["exec"]["command"])
        self.server.send_signal(signal.SIGTERM)
        while self.runner.poll() is None:
            if time.monotonic() - begun > self.manifest["terminationGracePeriodSeconds"]:
                self.server.kill()
            while_ending()
            time.sleep(0.5)
        return self.runner.returncode, time.monotonic() - begun


@contextmanager
def running_pod(volumes: Path, variables: Mapping[str, str], *, cpu: str) -> Iterator[Pod]:
    """The started pod of the manifest with more variables and another limit of processors; killed at the end.

    volumes  folder of its volumes, which outlive it; the folder `secret` has the Secret
    """
    manifest = pod_template()
    [container] = manifest["containers"]
    container["env"] = [*container["env"], *({"name": name, "value": value} for name, value in variables.items())]
    container["resources"]["limits"]["cpu"] = cpu
    number = next(NUMBERS)
    name = f"cellar-pod-{os.getpid()}-{number}"
    bundle = volumes / name
    bundle.mkdir()
    pid_file, log = bundle / "pid", bundle / "log"
    with pod_network(number) as network:
        (bundle / "config.json").write_text(json.dumps(specification(manifest, name, volumes, network)))
        crun = SCRIPT.crun(SCRIPT.image_store())
        command = [*crun, "run", "--bundle", str(bundle), "--pid-file", str(pid_file), name]
        with log.open("wb") as out:
            runner = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            server = _first_process(runner, pid_file, log)
            pod = Pod(manifest, network.address, name, runner, server, bundle, log)
            pod.wait_until_started()
            yield pod
        finally:
            subprocess.run([*crun, "delete", "--force", name], check=False, capture_output=True)
            runner.wait(timeout=30)


def _first_process(runner: subprocess.Popen[bytes], pid_file: Path, log: Path) -> psutil.Process:
    for _ in range(600):
        if pid_file.exists() and (pid := pid_file.read_text()):
            return psutil.Process(int(pid))
        assert runner.poll() is None, log.read_text()
        time.sleep(0.05)
    runner.kill()
    raise AssertionError("the container did not start")


def specification(manifest: dict[str, Any], name: str, volumes: Path, network: Network) -> dict[str, Any]:
    """The OCI runtime configuration of the pod's container."""
    [container] = manifest["containers"]
    security, pod_security = container["securityContext"], manifest["securityContext"]
    assert pod_security["seccompProfile"] == {"type": "RuntimeDefault"}
    spec: dict[str, Any] = SCRIPT.image_specification(SCRIPT.image_store(), container.get("args", []))
    spec["hostname"] = NAME
    spec["root"]["readonly"] = security["readOnlyRootFilesystem"]
    spec["process"] |= {
        "user": {
            "uid": pod_security["runAsUser"],
            "gid": pod_security["runAsGroup"],
            "additionalGids": [pod_security["fsGroup"]],
        },
        "env": variables(spec["process"]["env"], manifest, container),
        "noNewPrivileges": not security["allowPrivilegeEscalation"],
        "rlimits": [],
    }
    if security["capabilities"]["drop"] == ["ALL"]:
        spec["process"]["capabilities"] = {}
    spec["mounts"] += mounts(manifest, container, volumes)
    for namespace in spec["linux"]["namespaces"]:
        if namespace["type"] == "network":
            namespace["path"] = network.namespace
    limits = {resource: quantity(text) for resource, text in container["resources"]["limits"].items()}
    SCRIPT.limit_resources(spec, name, memory_bytes=int(limits["memory"]), cores=limits["cpu"])
    return spec


def variables(image: list[str], manifest: dict[str, Any], container: dict[str, Any]) -> list[str]:
    """Those of the image, of the cluster, of its Services unless the manifest has none, and of the container."""
    links = {
        "CELLAR_PORT": "tcp://10.96.0.20:80",
        "CELLAR_SERVICE_HOST": "10.96.0.20",
        "CELLAR_SERVICE_PORT": "80",
        "CELLAR_SERVICE_PORT_HTTP": "80",
    }
    values = dict(line.split("=", 1) for line in image)
    values |= {"HOSTNAME": NAME, "KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_PORT": "tcp://10.96.0.1:443"}
    if manifest.get("enableServiceLinks", True):
        values |= links
    values |= {each["name"]: each["value"] for each in container["env"]}
    return [f"{name}={value}" for name, value in values.items()]


def mounts(manifest: dict[str, Any], container: dict[str, Any], volumes: Path) -> list[dict[str, Any]]:
    """The volumes of the pod, made where they are missing, with the group of the pod."""
    group = manifest["securityContext"]["fsGroup"]
    sources = {volume["name"]: volume for volume in manifest["volumes"]}
    return [_mount(sources[each["name"]], each, volumes, group) for each in container["volumeMounts"]]


def _mount(volume: dict[str, Any], mount: dict[str, Any], volumes: Path, group: int) -> dict[str, Any]:
    place, access = mount["mountPath"], "ro" if mount.get("readOnly") else "rw"
    if volume.get("emptyDir", {}).get("medium") == "Memory":
        limit = int(quantity(volume["emptyDir"]["sizeLimit"]))
        return {"destination": place, "type": "tmpfs", "source": "tmpfs", "options": [f"size={limit}", "mode=1777"]}
    folder = volumes / volume["name"]
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    if "secret" in volume:
        _write_secret(volumes / "secret", folder)
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            os.chown(path, -1, group)
            path.chmod(path.stat().st_mode | (0o2770 if path.is_dir() else 0o660))
    return {"destination": place, "type": "bind", "source": str(folder), "options": ["bind", access]}


def _write_secret(source: Path, folder: Path) -> None:
    """Files behind two symbolic links, so that the kubelet can replace all of them at once."""
    version = folder / "..2026_01_01_00_00_00.1"
    if not version.exists():
        shutil.copytree(source, version)
        (folder / "..data").symlink_to(version.name)
        for file in source.iterdir():
            (folder / file.name).symlink_to(f"..data/{file.name}")
