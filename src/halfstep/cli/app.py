"""The `halfstep` command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import halfstep
from halfstep.cli.audit import SETTINGS, audit
from halfstep.cli.claims import claims
from halfstep.cli.compare import compare, train
from halfstep.cli.diff import diff
from halfstep.cli.doctor import doctor
from halfstep.cli.export import export
from halfstep.cli.formats import formats
from halfstep.cli.inspect import inspect
from halfstep.cli.kb import kb
from halfstep.cli.law import law
from halfstep.cli.memory import memory
from halfstep.cli.mismatch import mismatch
from halfstep.cli.probe import probe
from halfstep.cli.recipes import recipes
from halfstep.cli.scales import scales
from halfstep.cli.site import site
from halfstep.cli.sweep import sweep
from halfstep.cli.terminal import fail
from halfstep.errors import HalfstepError


_EXTRAS = {
    "matplotlib": "lab",
    "jinja2": "lab",
    "tensorboard": "lab",
    "sklearn": "lab",
    "transformers": "hf",
    "gguf": "export",
    "ray": "ray",
    "submitit": "submitit",
}
"""What commands import that a plain installation has not, and the extra that brings it."""

app = typer.Typer(
    name="halfstep",
    help="Train neural networks in few bits: fp16, bf16 and below, measured against fp32.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"halfstep {halfstep.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train neural networks in few bits: fp16, bf16 and below, measured against fp32."""


app.command("compare")(compare)
app.command("train")(train)
app.command("doctor")(doctor)
app.command("audit", context_settings=SETTINGS)(audit)
app.command("inspect")(inspect)
app.command("diff")(diff)
app.command("export")(export)
app.command("probe")(probe)
app.command("mismatch")(mismatch)
app.command("scales")(scales)
app.command("memory")(memory)
app.command("site")(site)
app.add_typer(sweep, name="sweep")
app.add_typer(law, name="law")
app.add_typer(formats, name="formats")
app.add_typer(recipes, name="recipes")
app.add_typer(kb, name="kb")
app.add_typer(claims, name="claims")


def main() -> None:
    """Run the command line. What halfstep raises on purpose is one message and exit code 2, not a traceback."""
    try:
        app()
    except HalfstepError as error:
        fail(str(error))
        sys.exit(2)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        fail(f"this command needs {error.name}, which is not installed: pip install 'halfstep[{extra}]'")
        sys.exit(2)
    except KeyboardInterrupt:  # before a command runs: click ends those
        sys.exit(130)
