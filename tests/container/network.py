"""A network namespace with an address of its own, joined to this machine, as that of a pod."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """A network namespace: its file and its address."""

    namespace: str
    address: str


@contextmanager
def pod_network(number: int) -> Iterator[Network]:
    """A namespace whose interface and loopback are up; removed at the end. `number`: of this process, up to 63."""
    name = f"pod{os.getpid()}n{number}"
    # Of the range for tests of networks (RFC 2544), which no machine should use.
    outside, inside = (f"198.18.77.{4 * number + host}" for host in (1, 2))
    _ip("netns", "add", name)
    try:
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("address", "add", f"{outside}/30", "dev", name)
        _ip("link", "set", name, "up")
        _ip("-n", name, "address", "add", f"{inside}/30", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "route", "add", "default", "via", outside)
        yield Network(f"/var/run/netns/{name}", inside)
    finally:
        _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
