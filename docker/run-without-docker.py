#!/usr/bin/env python3
"""Serves the image of build-without-docker.sh under crun with the limits of compose.yaml; as root.

As `docker compose up`, but on the network of the host: CELLAR_PORT is the port of the server. Arguments replace the
command of the image. SIGTERM and SIGINT are passed on; the exit status is the server's.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CGROUPS = "/sys/fs/cgroup"
# crun 1.8 fails on a machine with both versions of cgroups: version 2 is unmounted in a mount namespace of its own.
CRUN = f'umount {CGROUPS}/unified 2>/dev/null; exec crun --root "$0" "$@"'
# The default profile of Docker, Podman and CRI-O, of a package that buildah depends on.
SECCOMP = Path("/usr/share/containers/seccomp.json")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def main(arguments: list[str]) -> int:
    """Write the bundle and run it; the exit status of the server."""
    store = image_store()
    name = f"cellar-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="cellar-") as bundle:
        (Path(bundle) / "config.json").write_text(json.dumps(specification(store, name, arguments)))
        pid_file = Path(bundle) / "pid"
        command = [*crun(store), "run", "--bundle", bundle, "--pid-file", str(pid_file), name]
        container = subprocess.Popen(command, start_new_session=True)

        def forward(number: int, _frame: object) -> None:
            if pid_file.exists():
                os.kill(int(pid_file.read_text()), number)

        signal.signal(signal.SIGTERM, forward)
        signal.signal(signal.SIGINT, forward)
        return container.wait()


def image_store() -> Path:
    """The folder of the images and of the volumes."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("CELLAR_IMAGES") or home / "cellar-containers")


def crun(store: Path) -> list[str]:
    """The command of crun, for the containers of a store."""
    manager = "cgroupfs" if has_cgroups() else "disabled"
    return ["unshare", "--mount", "sh", "-c", CRUN, str(store / "crun"), f"--cgroup-manager={manager}"]


def has_cgroups() -> bool:
    """Whether cgroups can be made: not inside most containers."""
    return os.access(CGROUPS, os.W_OK)


def specification(store: Path, name: str, arguments: list[str]) -> dict[str, Any]:
    """The OCI runtime configuration: that of the image, with the limits of compose.yaml."""
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["cellar"]
    user, group = (int(part) for part in service["user"].split(":"))
    spec = image_specification(store, arguments)
    spec["root"]["readonly"] = service["read_only"]
    spec["process"] |= {
        "user": {"uid": user, "gid": group},
        "env": environment(spec["process"]["env"], service["environment"]),
        "noNewPrivileges": "no-new-privileges:true" in service["security_opt"],
        "rlimits": [{"type": f"RLIMIT_{k.upper()}", "hard": v, "soft": v} for k, v in service["ulimits"].items()],
    }
    if service["cap_drop"] == ["ALL"]:
        spec["process"]["capabilities"] = {}
    for line in service["tmpfs"]:
        place, _, options = line.partition(":")
        spec["mounts"] += [{"destination": place, "type": "tmpfs", "source": "tmpfs", "options": options.split(",")}]
    for line in service["volumes"]:
        volume, _, place = line.partition(":")
        folder = store / volume
        folder.mkdir(exist_ok=True)
        os.chown(folder, user, group)
        spec["mounts"] += [{"destination": place, "type": "bind", "source": str(folder), "options": ["bind", "rw"]}]
    spec["linux"]["namespaces"] = [kind for kind in spec["linux"]["namespaces"] if kind["type"] != "network"]
    limit_resources(spec, name, memory_bytes=size(service["mem_limit"]), processes=service["pids_limit"])
    return spec


def image_specification(store: Path, arguments: list[str]) -> dict[str, Any]:
    """The OCI runtime configuration of the image, without limits; arguments replace its command."""
    driver = (store / "driver").read_text().strip()
    buildah = ["buildah", "--root", str(store / driver), "--runroot", str(store / "run"), "--storage-driver", driver]
    image = json.loads(answer([*buildah, "inspect", "--type", "image", "localhost/cellar"]))["OCIv1"]["config"]
    spec: dict[str, Any] = json.loads(default_specification())
    spec["root"]["path"] = answer([*buildah, "mount", "cellar"])
    spec["process"] |= {
        "terminal": False,
        "args": image["Entrypoint"] + (arguments or image["Cmd"]),
        "env": image["Env"],
    }
    spec["linux"].pop("resources")
    if SECCOMP.exists():
        spec["linux"]["seccomp"] = seccomp(json.loads(SECCOMP.read_text()))
    return spec


def limit_resources(
    spec: dict[str, Any], name: str, *, memory_bytes: int, processes: int | None = None, cores: float | None = None
) -> None:
    """Give the container a cgroup with these limits, where cgroups can be made."""
    if not has_cgroups():
        print(f"{CGROUPS} cannot be written: memory, processes and processors are not limited", file=sys.stderr)
        spec["mounts"] = [mount for mount in spec["mounts"] if mount["type"] != "cgroup"]
        return
    spec["linux"]["cgroupsPath"] = f"/{name}"
    spec["linux"]["resources"] = {
        "memory": {"limit": memory_bytes},
        **({} if processes is None else {"pids": {"limit": processes}}),
        **({} if cores is None else {"cpu": {"quota": int(cores * 100_000), "period": 100_000}}),
    }


def seccomp(profile: dict[str, Any]) -> dict[str, Any]:
    """The OCI form of a profile, for a container without capabilities on this machine."""
    machine = platform.machine()
    own = f"SCMP_ARCH_{machine.upper()}"
    related = next(each["subArchitectures"] or [] for each in profile["archMap"] if each["architecture"] == own)
    rules = [
        rule
        for rule in profile["syscalls"]
        if "caps" not in rule["includes"]
        and ARCHITECTURES[machine] in rule["includes"].get("arches", [ARCHITECTURES[machine]])
    ]
    keys = ("names", "action", "errnoRet", "args")
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": [own, *related],
        "syscalls": [{key: rule[key] for key in keys if rule.get(key) is not None} for rule in rules],
    }


def environment(image: list[str], service: dict[str, Any]) -> list[str]:
    """The environment variables of the image, replaced by those of compose.yaml and by CELLAR_PORT of this process."""
    values = dict(line.split("=", 1) for line in image)
    for name, value in service.items():
        if value is None:
            values |= {name: os.environ[name]} if name in os.environ else {}
        else:
            values[name] = expand(str(value))
    values["CELLAR_PORT"] = os.environ.get("CELLAR_PORT", values["CELLAR_PORT"])
    return [f"{name}={value}" for name, value in values.items()]


def expand(text: str) -> str:
    """A value of compose.yaml with the variables of this process, or their defaults."""
    return re.sub(r"\$\{(\w+):-(.*?)\}", lambda found: os.environ.get(found[1]) or found[2], text)


def size(text: str) -> int:
    """Bytes of a size such as 8g or 512m."""
    number, unit = re.fullmatch(r"([\d.]+)([bkmg]?)(?:i?b)?", expand(text).lower()).groups()
    return int(float(number) * 1024 ** "bkmg".index(unit or "b"))


def default_specification() -> str:
    """The output of `crun spec`."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["crun", "spec"], cwd=folder, check=True)
        return (Path(folder) / "config.json").read_text()


def answer(command: list[str]) -> str:
    """The output of a command."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
