"""The `halfstep` command."""

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

import halfstep
from halfstep.cli.terminal import fail
from halfstep.errors import HalfstepError


COMMANDS = {
    "compare": (
        "Train one model under several recipes from the same weights on the same batches, and report what each breaks."
    ),
    "train": "Train a model under one recipe, and compare it with fp32's cached baseline if there is one.",
    "doctor": (
        "Show each recipe's path on this machine and why, and test every kernel against the reference, bit for bit."
    ),
    "audit": (
        "Run SCRIPT for a few steps: which share of its updates is lost, what it stores in which dtype, and "
        "how to fix it."
    ),
    "inspect": "Which precision is this checkpoint, really? Reads the bits of every value, once, in bounded memory.",
    "diff": "How was checkpoint B made from A? Finds casts, quantisation, merges and further training in the bits.",
    "export": (
        "Write MODEL for servers: vLLM, SGLang, transformers. The file's values equal those in training's matmuls."
    ),
    "probe": "Is MODEL safe in a number format, in the forward and in the backward pass?",
    "mismatch": (
        "Compare POLICY's next-token distributions under two recipes: KL, importance ratios, first module that differs."
    ),
    "scales": "Compare the standard deviation of every activation, weight and gradient of MODEL with formats' ranges.",
    "memory": "Count the bytes of training MODEL, by role: each recipe is run on tensors without storage.",
    "site": "Write one page that needs no network: the knowledge base, number formats, and the memory of training.",
    "sweep": "Train recipes over a grid of learning rates, sizes or steps, with several seeds, and judge stability.",
    "law": "Scaling laws for precision: predict a loss, or fit the law to a sweep.",
    "formats": "List the number formats; `formats show NAME` prints everything about one, and how it rounds a number.",
    "recipes": "List the recipes; `recipes show NAME` prints every field of one.",
    "kb": "In which precision was this model pre-trained, and is it safe to run it in another?",
    "claims": "What papers claim, what we measured, and the verdict; `claims show ID` prints one in full.",
}
"""Each command's line in the list of commands. A command's file is imported when the command is called."""

_FILES = {"train": "compare", "mismatch": "probe", "site": "kb", "diff": "inspect"}
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
"""Packages that a plain installation lacks, and the extra that installs each."""


class _Commands(TyperGroup):
    """The top-level group: lists commands with their help lines, and imports a command's file when it is called."""

    def __init__(self, **attributes: Any) -> None:
        commands = {name: TyperCommand(name, help=line) for name, line in COMMANDS.items()}
        super().__init__(**{**attributes, "commands": commands})

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(str(name)), rest


def load(name: str) -> Any:
    """The click command of that name, from the file `halfstep.cli.NAME` or the one that `_FILES` gives."""
    module = import_module(f"halfstep.cli.{_FILES.get(name, name)}")
    command, holder = getattr(module, name), typer.Typer()
    if isinstance(command, typer.Typer):
        holder.add_typer(command, name=name, help=COMMANDS[name])
    else:
        holder.command(name, context_settings=getattr(module, "SETTINGS", None))(command)
    return get_group(holder).commands[name]


app = typer.Typer(
    cls=_Commands,
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


def main() -> None:
    """Run the command line. A HalfstepError is printed as one message with exit code 2, not as a traceback."""
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
