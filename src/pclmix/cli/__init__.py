"""The `pclmix` command: arguments to calls, no logic. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from pclmix import __version__
from pclmix.errors import PclmixError

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
    verbose: Annotated[int, typer.Option("-v", "--verbose", count=True, help="Say more; -vv says everything.")] = 0,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    level = [logging.WARNING, logging.INFO, logging.DEBUG][min(verbose, 2)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", force=True)


# Each file below adds its commands to `app`.
from pclmix.cli import (  # noqa: E402, F401
    calibrate,
    compare,
    crossval,
    data,
    demo,
    dicom,
    evaluate,
    export,
    methods,
    predict,
    serve,
    simulate,
    study,
    train,
)


def main() -> None:
    """Run the command line; a user's mistake is one message on stderr and exit code 2.

    SIGTERM unwinds like an error, so that nothing half-written stays; a training that has begun saves first.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except PclmixError as error:
        _complain(str(error))
    except PermissionError as error:
        _complain(
            f"{error.filename or 'a file or folder'}: {error.strerror or error}; "
            "ask for the right to use it, or choose another place"
        )
    except KeyboardInterrupt:
        _complain("interrupted", code=130)
    except SystemExit as stop:
        if _was_interrupted(stop):
            _complain("interrupted", code=130)
        raise
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)


def _was_interrupted(stop: SystemExit) -> bool:
    """Typer turns Ctrl-C into an exit without a word; a training that has saved exits by itself and has spoken."""
    cause: BaseException | None = stop
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def _terminate(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _complain(message: str, code: int = 2) -> None:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, highlight=False).print("error: ", style="bold red", end="")
    print(message, file=sys.stderr)
    sys.exit(code)
