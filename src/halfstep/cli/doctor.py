"""`halfstep doctor`: each recipe's path on this machine, and a test of every kernel against the reference."""

from typing import Annotated

import typer

from halfstep.cli.terminal import Json


def doctor(
    recipes: Annotated[
        list[str] | None, typer.Argument(help="Recipes to report on, your own too. Default: all named ones.")
    ] = None,
    as_json: Json = False,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="RULE", help="Print the Triton source generated from an update rule ('adamw'); test nothing."
        ),
    ] = None,
) -> None:
    """Show each recipe's path on this machine and why, and test every kernel against the reference, bit for bit.

    Operands equal the reference's bits on every machine. Emulated matmuls have exact terms and float32 sums.
    Matmuls on FP8 tensor cores have exact terms and sums of 13 fraction bits (compute capability 8.9 and 9).

    Exit code 1: a kernel differs from the reference on this machine.
    """
    from halfstep.cli.diagnosis import diagnosed, source_of

    if source is not None:
        typer.echo(source_of(source))
    elif diagnosed(recipes, as_json):
        raise typer.Exit(1)
