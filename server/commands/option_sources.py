"""The sources of options besides the command line: environment variables and the configuration file."""

from __future__ import annotations

import os
import re
import sys

from cyclopts import App, ArgumentCollection
from cyclopts.config import Env

from bench.options import BenchOptions
from server.configuration.config_file import ConfigFile, ConfigFileError
from server.configuration.options import options
from server.configuration.peer_names import missing_option, nearest_option
from server.configuration.settings import ENVIRONMENT_PREFIX, Settings
from server.replicas.options import RayOptions
from server.terminal.options import ChatOptions, RunOptions

EXIT_USAGE = 2
# Commands with options besides the options of `cellar serve`.
SECTIONS: dict[str, type] = {"bench": BenchOptions, "chat": ChatOptions, "run": RunOptions, "ray": RayOptions}
# The argument of the commands, and variables of compose.yaml and the scripts in docker/.
OTHER_VARIABLES = frozenset({"CELLAR_MODEL", "CELLAR_IMAGES"})
_service_link = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)")


class Environment(Env):
    """Options from CELLAR_ variables. An empty variable counts as not set: compose.yaml passes those."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Add the tokens of the variables."""
        super().__call__(app, commands, arguments)
        for argument in arguments:
            argument.tokens[:] = [token for token in argument.tokens if token.value or token.source != self.source]


class File(ConfigFile):
    """Options from the configuration file. Ends the process if the file is wrong."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Add the tokens of the file."""
        try:
            super().__call__(app, commands, arguments)
        except ConfigFileError as error:
            sys.stderr.write(f"cellar: {error}\n")
            sys.exit(EXIT_USAGE)


def check_environment() -> None:
    """Raise ValueError for a CELLAR_ variable that does not belong to an option, with the nearest name."""
    kinds = (Settings, *SECTIONS.values())
    variables = OTHER_VARIABLES.union(*(option.variables for kind in kinds for option in options(kind)))
    for name, value in sorted(os.environ.items()):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in variables or _is_service_link(name, value):
            continue
        keys = [_key(variable) for variable in variables]
        remedy = missing_option(_key(name), keys)
        answer = f". {remedy}" if remedy else f"; the nearest one is {_variable(nearest_option(_key(name), keys))}"
        raise ValueError(f"the environment variable {name} is no setting{answer}")


def _key(variable: str) -> str:
    """The name of an option without dashes, of an environment variable."""
    return variable.removeprefix(ENVIRONMENT_PREFIX).replace("_", "-").lower()


def _variable(key: str) -> str:
    return ENVIRONMENT_PREFIX + key.replace("-", "_").upper()


def _is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes or Docker made the variable for a service with a name like "cellar-web"."""
    return value.startswith(("tcp://", "udp://")) or _service_link.search(name) is not None
