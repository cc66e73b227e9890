"""`halfstep doctor`: which path each recipe takes on this machine, and whether the kernels are right on it."""

from typing import Annotated

import typer

from halfstep.cli.terminal import Json


def doctor(
    recipes: Annotated[
        list[str] | None, typer.Argument(help="Recipes whose path to say, your own too. Left out: all named ones.")
    ] = None,
    as_json: Json = False,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="RULE", help="Print the Triton source that is made of an update rule ('adamw'); test nothing."
        ),
    ] = None,
) -> None:
    """Say which path each recipe takes here and why, and test every kernel against the reference, bit for bit.

    Operands are the reference's bits on every machine. Products that are carried are exact, with sums in float32.
    Products on a GPU's FP8 tensor cores have exact terms and sums of 13 fraction bits (compute capability 8.9 and 9).

    Exit code 1: a kernel differs from the reference on this machine.
    """
    from halfstep.cli.diagnosis import diagnosed, source_of

    if source is not None:
        typer.echo(source_of(source))
    elif diagnosed(recipes, as_json):
        raise typer.Exit(1)
