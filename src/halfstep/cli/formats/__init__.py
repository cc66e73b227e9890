"""`halfstep formats`: list formats, show one, compare two, and add two numbers step by step. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer

from halfstep import formats as room
from halfstep.cli.formats import page, table
from halfstep.cli.formats.table import read_number
from halfstep.cli.terminal import Json, answer
from halfstep.formats.exact import round_exactly


formats = typer.Typer(invoke_without_command=True)

Name = Annotated[str, typer.Argument(help="A format's name or alias; also eXmY and positN_ES.")]
Rounding = Annotated[
    str, typer.Option("--rounding", help="nearest_even, nearest_away, nearest_up, toward_zero, up, down or stochastic.")
]
Overflow = Annotated[str, typer.Option("--overflow", help="saturate, or ieee: infinity or NaN beyond the range.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the number line to a file (png, pdf or svg).")
]
Number = Annotated[str, typer.Argument(help="3.25, -1e-3, 0x1.8p3, 1/3 or 2^-24.")]


@formats.callback()
def listing(context: typer.Context, as_json: Json = False) -> None:
    """List the number formats: scalar ones first, then those whose elements share a scale."""
    if context.invoked_subcommand is not None:
        return
    scalars = [room.get(name) for name in room.names()]
    blocks = [room.get_block(name) for name in room.block_names()]
    members = [table.parameters(f) for f in scalars]
    answer(
        as_json,
        lambda: {"formats": members, "block_formats": [table.block_parameters(b) for b in blocks]},
        lambda: f"{table.scalar_table(scalars)}\n\n{table.block_table(blocks)}",
    )


@formats.command()
def show(
    name: Name,
    value: Annotated[
        str | None, typer.Option("--value", help="Round this number: 3.25, -1e-3, 0x1.8p3, 1/3, 2^-24, inf or nan.")
    ] = None,
    rounding: Rounding = "nearest_even",
    overflow: Overflow = "saturate",
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Print one format: parameters, special codes, number line; with --value, how a number is rounded."""
    scalar, block = page.find(name)
    if scalar is None and (value is not None or plot is not None):
        raise page.needs_scalar(name)
    rounded = None
    if scalar is not None and value is not None:
        rounded = round_exactly(read_number(value), scalar, rounding, overflow)
    if scalar is not None and plot is not None:
        from halfstep.cli.formats.plot import draw

        draw(scalar, plot, rounded)
    drawn = f"\n\nwrote {plot}" if plot is not None else ""
    answer(
        as_json,
        lambda: page.as_data(scalar, block, rounded),
        lambda: page.describe(scalar, block, rounded, rounding) + drawn,
    )


@formats.command()
def compare(a: Name, b: Name, as_json: Json = False) -> None:
    """Compare two formats: range, values per binade, values that only one of them has, rounding error."""
    from halfstep.cli.formats import difference

    one, other = page.scalar(a), page.scalar(b)
    answer(as_json, lambda: difference.as_data(one, other), lambda: difference.describe(one, other))


# A negative number is an argument here, not an unknown option.
@formats.command(context_settings={"ignore_unknown_options": True})
def add(name: Name, a: Number, b: Number, as_json: Json = False) -> None:
    """Add two numbers step by step: align, add, round, and show what is lost. For floats (fp32, bf16, e4m3fn ...)."""
    work = page.work_out(page.scalar(name), read_number(a), read_number(b))
    answer(as_json, lambda: page.addition_data(work), lambda: page.describe_addition(work))
