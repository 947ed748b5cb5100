"""Random blocks of GGUF files through the code that repacks, unpacks, looks up and multiplies them, under sanitizers.

`python -m tests.faults.sanitizers --count 100000` compiles block_fuzzer.cpp with the address and undefined behaviour
sanitizers, for any processor. The exit code is 1 if a sanitizer reports something, or accepted scales make weights
or products that are infinite or no numbers, or a row that is looked up differs from the weights that are unpacked.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from engine.kernels.cpu.build.libraries import SOURCE

FUZZER = Path(__file__).with_name("block_fuzzer.cpp")
FLAGS = ("-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-fopenmp")


@dataclass(frozen=True, slots=True)
class Result:
    """The number of matrices by outcome, and what the sanitizers report.

    refused  a scale is infinite or no number
    wrong    a weight or product is infinite or no number although the scales are accepted, or rows differ
    """

    sound: int
    refused: int
    wrong: int
    report: str
    seconds: float


def fuzz(count: int, seed: int = 1) -> Result:
    """Repack and unpack random matrices."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "fuzzer")
        subprocess.run(["g++", *FLAGS, f"-I{SOURCE}", str(FUZZER), "-o", str(program)], check=True)
        start = time.monotonic()
        done = subprocess.run([program, str(count), str(seed)], capture_output=True, text=True, check=False)
    counts = done.stdout.split() if done.returncode == 0 else ["0", "0", "0"]
    return Result(*map(int, counts), done.stderr, time.monotonic() - start)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    result = fuzz(options.count, options.seed)
    print(f"{result.sound} sound, {result.refused} refused, {result.wrong} wrong, in {result.seconds:.0f} s")
    print(result.report or "no report")
    raise SystemExit(bool(result.report or result.wrong))
