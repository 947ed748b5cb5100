#!/usr/bin/env python3
"""Serves the image of build-without-docker.sh under crun with the limits of compose.yaml; as root.

As `docker compose up`, with two differences: the network is that of the host, so CELLAR_PORT is the port of the server,
and no cgroup limits memory and processes (mem_limit, pids_limit). Arguments replace the command of the image.
SIGTERM and SIGINT are passed on; the exit status is the server's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
# crun 1.8 fails on a machine with both versions of cgroups: version 2 is unmounted in a mount namespace of its own.
CRUN = 'umount /sys/fs/cgroup/unified 2>/dev/null; exec crun --root "$0" --cgroup-manager=disabled "$@"'


def main(arguments: list[str]) -> int:
    """Write the bundle and run it; the exit status of the server."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    store = Path(os.environ.get("CELLAR_IMAGES") or home / "cellar-containers")
    name = f"cellar-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="cellar-") as bundle:
        (Path(bundle) / "config.json").write_text(json.dumps(specification(store, arguments)))
        pid_file = Path(bundle) / "pid"
        crun = ["unshare", "--mount", "sh", "-c", CRUN, str(store / "crun"), "run", "--bundle", bundle]
        container = subprocess.Popen([*crun, "--pid-file", str(pid_file), name], start_new_session=True)

        def forward(number: int, _frame: object) -> None:
            if pid_file.exists():
                os.kill(int(pid_file.read_text()), number)

        signal.signal(signal.SIGTERM, forward)
        signal.signal(signal.SIGINT, forward)
        return container.wait()


def specification(store: Path, arguments: list[str]) -> dict[str, Any]:
    """The OCI runtime configuration: that of the image, with the limits of compose.yaml."""
    driver = (store / "driver").read_text().strip()
    buildah = ["buildah", "--root", str(store / driver), "--runroot", str(store / "run"), "--storage-driver", driver]
    image = json.loads(answer([*buildah, "inspect", "--type", "image", "localhost/cellar"]))["OCIv1"]["config"]
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["cellar"]
    user, group = (int(part) for part in service["user"].split(":"))
    spec: dict[str, Any] = json.loads(default_specification())
    spec["root"] = {"path": answer([*buildah, "mount", "cellar"]), "readonly": service["read_only"]}
    spec["process"] |= {
        "terminal": False,
        "user": {"uid": user, "gid": group},
        "args": image["Entrypoint"] + (arguments or image["Cmd"]),
        "env": environment(image["Env"], service["environment"]),
        "capabilities": {} if service["cap_drop"] == ["ALL"] else spec["process"]["capabilities"],
        "noNewPrivileges": "no-new-privileges:true" in service["security_opt"],
        "rlimits": [{"type": f"RLIMIT_{k.upper()}", "hard": v, "soft": v} for k, v in service["ulimits"].items()],
    }
    spec["mounts"] = [mount for mount in spec["mounts"] if mount["type"] != "cgroup"]
    for line in service["tmpfs"]:
        place, _, options = line.partition(":")
        spec["mounts"] += [{"destination": place, "type": "tmpfs", "source": "tmpfs", "options": options.split(",")}]
    for line in service["volumes"]:
        name, _, place = line.partition(":")
        folder = store / name
        folder.mkdir(exist_ok=True)
        os.chown(folder, user, group)
        spec["mounts"] += [{"destination": place, "type": "bind", "source": str(folder), "options": ["bind", "rw"]}]
    spec["linux"]["namespaces"] = [kind for kind in spec["linux"]["namespaces"] if kind["type"] != "network"]
    del spec["linux"]["resources"]
    return spec


def environment(image: list[str], service: dict[str, Any]) -> list[str]:
    """The environment variables of the image, replaced by those of compose.yaml and by CELLAR_PORT of this process."""
    values = dict(line.split("=", 1) for line in image)
    for name, value in service.items():
        if value is None:
            values |= {name: os.environ[name]} if name in os.environ else {}
        else:
            values[name] = re.sub(r"\$\{(\w+):-(.*?)\}", lambda found: os.environ.get(found[1]) or found[2], str(value))
    values["CELLAR_PORT"] = os.environ.get("CELLAR_PORT", values["CELLAR_PORT"])
    return [f"{name}={value}" for name, value in values.items()]


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
