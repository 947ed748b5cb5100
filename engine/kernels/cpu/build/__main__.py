"""Builds the libraries of all kernels, as for wheels and images.

    python -m engine.kernels.cpu.build FOLDER [--machine MACHINE]

builds all variants into FOLDER, by default for this machine. MACHINE is an architecture as in `uname -m`: another one
is built by $CXX or by the cross compiler MACHINE-linux-gnu-g++, as for aarch64.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from engine.kernels.cpu.build.libraries import LibraryUnavailable, prebuild


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.cpu.build", description="Build all kernels.")
    parser.add_argument("folder", type=Path, help="for the libraries")
    parser.add_argument("--machine", help="architecture, as aarch64 or x86_64 (by default this machine's)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        prebuild(arguments.folder, arguments.machine)
    except LibraryUnavailable as error:
        parser.error(error.reason)


if __name__ == "__main__":
    _main()
