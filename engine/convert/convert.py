"""Converts a model: a checkpoint of transformers into a GGUF file, or back. The target appears when it is complete."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from engine.config import BUNDLED_NAME
from engine.convert.from_gguf import write_folder
from engine.convert.gguf_file import OnProgress, WeightType
from engine.convert.to_gguf import plan_file
from engine.errors import ModelInconvertible
from engine.gguf.architectures.settings import Inexpressible
from engine.kernels.cache_folder import scratch_folder, synchronise
from engine.load.read.checkpoint import READ_ERRORS, error_line, is_gguf, resolve

# Of Linux's renameat2: the folder of relative paths, and the flag.
_HERE, _EXCHANGE = -100, 2


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion, and the callbacks of its progress.

    source         a folder, a GGUF file, or a model of the hub; None: the bundled model
    target         a file that ends in .gguf, or a folder
    weight_type    of the written matrices; None: as in the source
    overwrite      whether an existing target is replaced
    on_phase       called with each phase
    on_progress    called with the written and all bytes of weights
    pre_tokenizer  its name in a GGUF file; None: the one with the same effect
    """

    source: str | None
    target: Path
    weight_type: WeightType | None
    overwrite: bool
    on_phase: Callable[[str], None]
    on_progress: OnProgress
    pre_tokenizer: str | None = None

    @property
    def to_gguf(self) -> bool:
        """Whether the target is a GGUF file."""
        return self.target.suffix.lower() == ".gguf"

    def refuse(self, reason: str) -> ModelInconvertible:
        """The error with a reason."""
        return ModelInconvertible(self.source or BUNDLED_NAME, reason)


def convert(conversion: Conversion) -> tuple[str, ...]:
    """Convert a model; returns its inputs other than text ("image", "audio"), whose weights are left out.

    Raises ModelMissing and ModelInconvertible; the target is then unchanged.
    """
    target = conversion.target
    if target.exists() and not conversion.overwrite:
        raise conversion.refuse(f"{target} exists; --force replaces it")
    if target.exists() and target.is_dir() == conversion.to_gguf:
        raise conversion.refuse(f"{target} is {'a folder' if target.is_dir() else 'a file that does not end in .gguf'}")
    disable_progress_bar()
    conversion.on_phase("resolve")
    source = resolve(conversion.source)
    if is_gguf(source) == conversion.to_gguf:
        reason = "both are GGUF" if conversion.to_gguf else "a GGUF file ends in .gguf"
        raise conversion.refuse(f"its target {target} has the format of the source: {reason}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(target.parent) as scratch:
            unread = (_to_gguf if conversion.to_gguf else _to_folder)(conversion, source, scratch / target.name)
            _replace(target, scratch)
    except Inexpressible as error:
        raise conversion.refuse(str(error)) from error
    except READ_ERRORS as error:
        raise conversion.refuse(error_line(error)) from error
    return unread


def _replace(target: Path, scratch: Path) -> None:
    """Move the finished target from `scratch` to its place; an old folder is removed with `scratch`."""
    finished = scratch / target.name
    for file in (path for path in (finished, *finished.rglob("*")) if path.is_file()):
        synchronise(file)
    if not target.is_dir():
        finished.rename(target)
    elif not _exchange(finished, target):
        target.rename(scratch / "replaced")
        try:
            finished.rename(target)
        except OSError:
            (scratch / "replaced").rename(target)
            raise


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders at once, so that a crash leaves both; False: not on this system or file system."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if not rename(_HERE, os.fsencode(first.absolute()), _HERE, os.fsencode(second.absolute()), _EXCHANGE):
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(second))


def _to_gguf(conversion: Conversion, folder: Path, path: Path) -> tuple[str, ...]:
    file = plan_file(folder, conversion.weight_type, conversion.pre_tokenizer, conversion.on_phase)
    _check_space(conversion, path, file.size)
    conversion.on_phase(f"write {file.weight_type}")
    file.write(path, conversion.on_progress)
    return file.unread_modalities


def _to_folder(conversion: Conversion, file: Path, folder: Path) -> tuple[str, ...]:
    write_folder(file, folder, conversion.weight_type, conversion.on_phase)
    return ()


def _check_space(conversion: Conversion, path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise conversion.refuse(f"the target needs {needed / 10**9:.1f} GB, {free / 10**9:.1f} GB are free")
