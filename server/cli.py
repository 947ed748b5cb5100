"""The command `cellar`. It imports torch only to serve, so --help answers at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Group, Parameter

from bench.options import BenchOptions
from engine.load.machine.resources import limit_spinning
from server.commands.option_sources import EXIT_USAGE, SECTIONS, Environment, File, check_environment
from server.commands.usage_errors import format_usage_error
from server.configuration.config_file import find, model_sections
from server.configuration.logs import configure_logging
from server.configuration.options import serve_arguments, serve_environment
from server.configuration.settings import ENVIRONMENT_PREFIX, Settings, make_disk_cache
from server.http.version import version
from server.models.configured import configured_entries, serves_several
from server.models.entry import ModelEntry
from server.models.keep_alive import parse_keep_alive
from server.replicas.options import RayOptions
from server.serving import EXIT_ADDRESS, run, run_several, warn_of_exposed_keys
from server.store.database import StoreError
from server.store.store import check_store
from server.terminal.load_screen import print_error, print_line
from server.terminal.options import ChatOptions, RunOptions

SERVER_GROUP = Group("Options of a server that is started", sort_key=1)


def make_app() -> App:
    """The command line. Every option is also an environment variable and a key of the configuration file."""
    app = App(
        name="cellar",
        help="An OpenAI-compatible LLM inference server.",
        version=version,
        config=(Environment(ENVIRONMENT_PREFIX, command=False), File(SECTIONS)),
        default_parameter=Parameter(negative=()),
        error_formatter=format_usage_error,
    )
    app.command(serve)
    app.command(chat)
    app.command(run_prompt, name="run")
    # Its arguments are no settings: none comes from the environment.
    app.command(pull, config=())
    app.command(make_models_app())
    app.command(bench)
    app.command(ray)
    # Its arguments are no settings: none comes from the environment.
    app.command(route, config=())
    app.command(plan)
    app.command(verify)
    app.command(doctor, config=())
    # Its arguments are no settings: none comes from the environment.
    app.command(convert, config=())
    app.command(completion, config=())
    return app


def main() -> None:
    """The entry point of the distribution."""
    if sys.platform == "win32":
        sys.exit("cellar: Windows is not supported; run it in WSL, the Windows Subsystem for Linux: wsl --install")
    limit_spinning()
    make_app()()


def serve(
    model: str | None = None,
    *others: Annotated[str, Parameter(show_env_var=False)],
    options: Annotated[Settings | None, Parameter(name="*")] = None,
) -> None:
    """Serve a model, or several, over HTTP until SIGTERM or Ctrl-C.

    Parameters
    ----------
    model
        A folder, or a hub id such as Qwen/Qwen3-0.6B. Default: the small bundled model.
    others
        More models: all are then loaded on demand.
    """
    settings = replace(options or Settings(), model=model)
    with _usage_errors(print_line):
        check_environment()
        entries = _entries_of_several(settings, () if model is None else (model, *others))
        if not entries:
            settings.check()
        check_store(settings.store)
        make_disk_cache(settings.disk_cache_folder)
    warn_of_exposed_keys(settings)
    sys.exit(run_several(settings, entries) if entries else run(settings))


def _entries_of_several(settings: Settings, sources: tuple[str, ...]) -> tuple[ModelEntry, ...]:
    """The models that are loaded on demand; none if the server has one model."""
    file = find(settings.config)
    sections = {} if file is None else model_sections(file, settings)
    if not serves_several(settings, sources, sections):
        return ()
    if settings.keep_alive is not None:
        parse_keep_alive(settings.keep_alive)
    from server.models.several import names_of

    entries = configured_entries(settings, sources, sections)
    names_of(entries)
    return entries


def chat(
    model: str | None = None,
    *,
    chat_options: Annotated[ChatOptions | None, Parameter(name="*")] = None,
    options: Annotated[Settings | None, Parameter(name="*", group=SERVER_GROUP)] = None,
) -> None:
    """Chat with a model on the terminal. /help lists the commands of the chat, Ctrl-D ends it.

    Parameters
    ----------
    model
        As for `cellar serve`. Default: the model of the server at --host and --port, else the bundled model.
    """
    from server.commands.chat import run_chat

    settings = _checked_client_settings(options)
    sys.exit(run_chat(model, chat_options or ChatOptions(), settings))


def run_prompt(
    model: str,
    prompt: Annotated[str | None, Parameter(show_env_var=False)] = None,
    /,
    *,
    run_options: Annotated[RunOptions | None, Parameter(name="*")] = None,
    options: Annotated[Settings | None, Parameter(name="*", group=SERVER_GROUP)] = None,
) -> None:
    """Answer one prompt: the answer goes to stdout, everything else to stderr.

    The exit code is 0 for an answer, 1 if there is none, and 2 for wrong options.

    Parameters
    ----------
    model
        As for `cellar serve`; cellar-tiny is the small bundled model.
    prompt
        The prompt. Text from a pipe is added to it, or is the prompt.
    """
    from server.commands.run import run_once

    settings = _checked_client_settings(options)
    sys.exit(run_once(model, prompt, run_options or RunOptions(), settings))


def pull(model: str, *, revision: str | None = None) -> None:
    """Download a model of the hub into its local cache. After an interruption, only missing files are downloaded.

    Prints the folder or the GGUF file, and the size. The exit code is 1 if the model is not there.

    Parameters
    ----------
    model
        A name such as Qwen/Qwen3-0.6B; for one GGUF file of a repository, organisation/model:Q4_K_M.
    revision
        A branch, a tag or a commit. Default: main. `cellar serve FOLDER` serves it.
    """
    from server.commands.pull import run_pull

    sys.exit(run_pull(model, revision))


def make_models_app() -> App:
    """`cellar models` and its subcommand."""
    app = App(name="models", help="List the models on the disk and of a running server, or remove one.")
    app.default(models)
    app.command(remove, config=())
    return app


def models(
    *,
    as_json: Annotated[bool, Parameter(name="--json", show_env_var=False, show_default="off")] = False,
    url: str = "http://127.0.0.1:8000",
    api_key: str | None = None,
) -> None:
    """List the models on the disk and of a running server.

    Parameters
    ----------
    as_json
        Print JSON.
    url
        The running server.
    api_key
        Its API key.
    """
    from server.commands.models import list_models

    with _usage_errors(print_error):
        check_environment()
    sys.exit(list_models(as_json=as_json, url=url, api_key=api_key))


def remove(name: str, *, yes: bool = False) -> None:
    """Remove a model from the hub's local cache.

    Parameters
    ----------
    name
        As listed by `cellar models`; organisation/model@revision removes one: by branch, tag or begin of its commit.
    yes
        Ask no question.
    """
    from server.commands.models import remove_model

    sys.exit(remove_model(name, confirmed=yes))


def completion(shell: Literal["bash", "zsh", "fish"], *, install: bool = False) -> None:
    """Print the completion script of a shell.

    Parameters
    ----------
    shell
        The shell.
    install
        Write the script where the shell finds it, and print the path.
    """
    app = make_app()
    if install:
        print_line(str(app.install_completion(shell=shell, add_to_startup=False)))
    else:
        print_line(app.generate_completion(prog_name="cellar", shell=shell))


def _checked_client_settings(options: Settings | None) -> Settings:
    """The settings of a command whose output is for programs or a chat: messages go to stderr."""
    settings = options or Settings()
    with _usage_errors(print_error):
        check_environment()
        settings.check()
        warn_of_exposed_keys(settings, print_error)
    return settings


@contextmanager
def _usage_errors(show: Callable[[str], None]) -> Iterator[None]:
    """An error of the settings is shown and ends the process."""
    try:
        yield
    except (ValueError, OSError, StoreError) as error:
        show(f"cellar: {error}")
        sys.exit(EXIT_USAGE)


def bench(
    model: str | None = None,
    *,
    bench_options: Annotated[BenchOptions | None, Parameter(name="*")] = None,
    options: Annotated[Settings | None, Parameter(name="*")] = None,
) -> None:
    """Measure latency, throughput, prefix reuse and long context, of a model or of running servers.

    Starts `cellar serve` with the options of that command, unless --base-url names servers with OpenAI's API. The exit
    code is 1 if a request failed.

    Parameters
    ----------
    model
        As for `cellar serve`; with --base-url, the model's name in requests. Default: the first model of the server.
    """
    from bench.command import ServeArguments, measured

    settings, bench_settings = options or Settings(), bench_options or BenchOptions()
    with _usage_errors(print_line):
        check_environment()
        keys = settings.all_keys
    warn_of_exposed_keys(settings)
    served = ServeArguments(
        arguments=(*([model] if model else []), *serve_arguments(settings)),
        environment=serve_environment(keys),
        names=settings.served_names or ([model] if model and bench_settings.base_url else []),
        api_key=keys[0] if keys else None,
        context=settings.context,
    )
    sys.exit(measured(bench_settings, served))


def ray(
    model: str | None = None,
    *,
    ray_options: Annotated[RayOptions | None, Parameter(name="*")] = None,
    options: Annotated[Settings | None, Parameter(name="*")] = None,
) -> None:
    """Serve a model by several replicas on Ray Serve until SIGTERM or Ctrl-C.

    Requests of a conversation meet the replica that has their prefix in its cache. The options of `cellar serve` hold
    for each replica; on this machine the replicas share its processors and 90 % of its memory.

    Parameters
    ----------
    model
        As for `cellar serve`.
    """
    from server.commands.ray import run_ray

    settings, cluster_options = replace(options or Settings(), model=model), ray_options or RayOptions()
    with _usage_errors(print_line):
        check_environment()
        if _entries_of_several(settings, () if model is None else (model,)):
            raise ValueError("cellar ray serves one model: without --models and [models.NAME] in cellar.toml")
        settings.check()
        cluster_options.check()
        check_store(settings.store)
        make_disk_cache(settings.disk_cache_folder)
    warn_of_exposed_keys(settings)
    sys.exit(run_ray(cluster_options, settings))


def route(*urls: Annotated[str, Parameter(show_env_var=False)], host: str = "127.0.0.1", port: int = 8000) -> None:
    """Pass requests on to running replicas until SIGTERM or Ctrl-C; streams go on at another one when theirs ends.

    Requests of a conversation meet the replica that has their prefix in its cache.

    Parameters
    ----------
    urls
        Addresses of `cellar serve` with the same model and options, such as http://127.0.0.1:8001.
    host
        Address to listen on.
    port
        Port to listen on; 0 selects a free one.
    """
    from server.commands.route import check_addresses, run_route
    from server.lifecycle import listen

    with _usage_errors(print_error):
        check_addresses(urls)
    configure_logging("warning", "text")
    try:
        listening = listen(host, port)
    except OSError as error:
        print_error(f"cellar: cannot listen on {host}:{port}: {error}")
        sys.exit(EXIT_ADDRESS)
    with listening:
        run_route(urls, listening)


def plan(
    model: str | None = None, *, json: bool = False, options: Annotated[Settings | None, Parameter(name="*")] = None
) -> None:
    """Show the memory that `cellar serve` takes with the same options, without reading the weights.

    The exit code is 1 if the model cannot be planned or does not fit.

    Parameters
    ----------
    model
        As for `cellar serve`; of a model of the hub only the configuration and the tokenizer are downloaded.
    json
        Print JSON, sizes in bytes.
    """
    from server.commands.plan import run_plan

    settings = replace(options or Settings(), model=model)
    with _usage_errors(print_line):
        check_environment()
        settings.check()
    sys.exit(run_plan(settings, as_json=json))


def verify(
    model: str | None = None,
    *,
    json: Annotated[Path | None, Parameter(show_env_var=False)] = None,
    options: Annotated[Settings | None, Parameter(name="*")] = None,
) -> None:
    """Show that a text does not depend on cache, batch, chunks, drafts, preemption and context shifts.

    The exit code is 1 if a text differs. With --disk-cache a restart is verified too, in a temporary folder.

    Parameters
    ----------
    model
        As for `cellar serve`.
    json
        A file for the report in JSON.
    """
    from server.commands.verify import run_verify

    settings = replace(options or Settings(), model=model)
    with _usage_errors(print_line):
        check_environment()
        settings.check()
    sys.exit(run_verify(settings, json))


def doctor(model: str | None = None, *, json: bool = False) -> None:
    """Show what this machine runs natively, what is missing, and the remedy. The exit code is 1 if it has a problem.

    Parameters
    ----------
    model
        A model that has to be there, or on the hub. Default: the bundled one.
    json
        Print JSON.
    """
    from server.commands.doctor import run_doctor

    sys.exit(run_doctor(model, as_json=json))


def convert(
    source: str,
    target: Path,
    *,
    weights: Annotated[Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q4_k_m"] | None, Parameter(name="--type")] = None,
    pre_tokenizer: str | None = None,
    force: bool = False,
) -> None:
    """Convert a model from safetensors to a GGUF file, or back. The exit code is 1 if that is impossible.

    Parameters
    ----------
    source
        A folder, a GGUF file, or a model of the hub.
    target
        A file that ends in .gguf, or a folder for safetensors, config.json and the tokenizer.
    weights
        The number format of the matrices; from q8_0 on only in GGUF. Default: as in the source, bf16 if quantised.
    pre_tokenizer
        The name of the pre-tokenizer in the GGUF file, if none has the same effect: texts may get other tokens.
    force
        Replace an existing target.
    """
    from server.commands.convert import run_conversion

    with _usage_errors(print_line):
        check_environment()
    sys.exit(run_conversion(source, target, weights=weights, pre_tokenizer=pre_tokenizer, force=force))
