"""A PostgreSQL of its own for tests, reached by a socket in its folder."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The folder of Debian for commands that users do not call.
HOMES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
START_SECONDS = 30


def installed() -> bool:
    """Whether PostgreSQL is installed, with a user other than root to run it."""
    return bool(HOMES) and (os.geteuid() != 0 or "postgres" in {user.pw_name for user in pwd.getpwall()})


@contextmanager
def serving() -> Iterator[str]:
    """The URL of a new, empty database."""
    folder = Path(tempfile.mkdtemp(prefix="cellar-postgres-"))
    as_user: dict[str, Any] = {}
    if os.geteuid() == 0:
        user = pwd.getpwnam("postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
        as_user = {"user": user.pw_uid, "group": user.pw_gid}
    data = folder / "data"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, **as_user}
    try:
        make = [HOMES[-1] / "initdb", "-D", data, "-U", "cellar", "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run(make, check=True, timeout=60, **quiet)
        serve = [HOMES[-1] / "postgres", "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
        with subprocess.Popen(serve, **quiet) as server:
            try:
                _wait(folder)
                yield f"postgresql:///postgres?host={folder}&user=cellar"
            finally:
                server.terminate()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    ready = [HOMES[-1] / "pg_isready", "-h", folder, "-q"]
    while subprocess.run(ready, check=False).returncode:
        assert time.monotonic() < deadline, "PostgreSQL did not start"
        time.sleep(0.05)
