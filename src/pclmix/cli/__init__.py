"""The `pclmix` command. Commands import torch only when they need it."""

from __future__ import annotations

import inspect
import logging
import os
import re
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from pclmix import __version__
from pclmix.errors import PclmixError
from pclmix.io.threads import set_threads

app = typer.Typer(
    name="pclmix",
    help="Medical image segmentation from scribbles.",
    epilog="Start with: pclmix demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"pclmix {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    verbose: Annotated[int, typer.Option("-v", "--verbose", count=True, help="Log more; -vv logs everything.")] = 0,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    level = [logging.WARNING, logging.INFO, logging.DEBUG][min(verbose, 2)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", force=True)


# Importing these modules adds their commands to `app`.
from pclmix.cli import data, predict, studies, train  # noqa: E402, F401

#: The commands of `pclmix --help` in the order a user needs them.
PANELS = {
    "Start here": ("demo", "serve"),
    "Data": ("import", "check", "split", "phantom", "scribble", "dicom"),
    "Train, predict, score": ("plan", "train", "predict", "evaluate", "compare", "info"),
    "Settings": ("config", "methods"),
    "Calibrate and export": ("calibrate", "export"),
    "Studies": ("crossval", "ablate", "sweep", "status"),
}


def _arrange() -> None:
    """Sort the registered commands by PANELS, others last, and unwrap their docstrings."""
    panel_of = {name: panel for panel, names in PANELS.items() for name in names}
    order = list(panel_of)

    def name(command: typer.models.CommandInfo) -> str:
        return command.name or str(getattr(command.callback, "__name__", ""))

    for command in app.registered_commands:
        command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command.callback) or "")
        command.rich_help_panel = panel_of.get(name(command), "Commands")
    app.registered_commands.sort(key=lambda c: order.index(name(c)) if name(c) in order else len(order))


_arrange()


def main() -> None:
    """Run the command line; a PclmixError becomes one message on stderr and exit code 2.

    SIGTERM unwinds like an exception, so that no partial files remain; a running training saves a checkpoint first.
    """
    set_threads()
    signal.signal(signal.SIGTERM, _terminate)
    # OpenMP reads this when torch is loaded: threads that spin while waiting slow down other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except PclmixError as error:
        _complain(str(error))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:  # missing permission, name too long, failing device
        name = str(error.filename or "a file or folder")
        shown = name if len(name) <= 300 else f"{name[:200]}... ({len(name)} letters)"
        way = "check its permissions" if isinstance(error, PermissionError) else "check the name"
        _complain(f"{shown}: {error.strerror or error}; {way}, or choose another path")
    except KeyboardInterrupt:
        _complain("interrupted", code=130)
    except SystemExit as stop:
        if _was_interrupted(stop):
            _complain("interrupted", code=130)
        if _received:
            sys.exit(128 + _received[0])  # Ray raises a SystemExit of its own instead, with code 1
        raise


def _was_interrupted(stop: SystemExit) -> bool:
    """Whether Ctrl-C caused this exit: Typer prints nothing then."""
    cause: BaseException | None = stop
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


_received: list[int] = []  # numbers of signals that ended the command


def _terminate(number: int, _: FrameType | None) -> None:
    _received.append(number)
    sys.exit(128 + number)


def _complain(message: str, code: int = 2) -> None:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, highlight=False).print("error: ", style="bold red", end="")
    print(message, file=sys.stderr)
    sys.exit(code)
