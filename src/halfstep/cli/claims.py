"""`halfstep claims`: what papers and forums claim, what we measured, and measuring it again."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli.terminal import fail, line_width, show_json, show_table
from halfstep.errors import ClaimError


if TYPE_CHECKING:
    from halfstep.claims import Claim


claims = typer.Typer(
    help="What papers claim, what we measured, and the verdict; `claims show ID` prints all of one.",
    invoke_without_command=True,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@claims.callback()
def listing(
    context: typer.Context,
    run: Annotated[str | None, typer.Option("--run", metavar="ID", help="Measure one claim again.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Measure all claims with a short check again.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/claims.md.")] = False,
    as_json: Json = False,
) -> None:
    """List the claims, or measure them again. Exit code 1: a number was not confirmed."""
    asked = [run is not None, check, markdown, as_json]
    if sum(asked) > 1 or (any(asked) and context.invoked_subcommand is not None):
        raise ClaimError("found several of --run, --check, --markdown, --json and a command; give one of them")
    if context.invoked_subcommand is not None:
        return
    from halfstep.claims import get_claim, load
    from halfstep.claims import page as write

    if run is not None:
        raise typer.Exit(0 if _run(get_claim(run)) else 1)
    if check:
        raise typer.Exit(0 if _check([claim for claim in load() if claim.short]) else 1)
    if markdown:
        sys.stdout.write(write.markdown(load()))
    elif as_json:
        show_json([write.as_data(claim) for claim in load()])
    else:
        show_table(["id", "verdict", "claim"], [(claim.id, claim.verdict, claim.claim) for claim in load()])


@claims.command()
def show(id: Annotated[str, typer.Argument(help="A claim's id.")], as_json: Json = False) -> None:
    """Print the whole claim: its source and conditions, our figure and where it was measured."""
    from halfstep.claims import get_claim
    from halfstep.claims.page import as_data, describe

    claim = get_claim(id)
    if as_json:
        show_json(as_data(claim))
    else:
        typer.echo(describe(claim, line_width(105)))


def _run(claim: Claim) -> bool:
    """Run the claim's command and print what came out beside what is recorded; whether it is confirmed."""
    if not claim.command:
        raise ClaimError(f"claim {claim.id!r} is open and has no command yet. {claim.note}")
    typer.echo(f"$ {claim.command}")
    if claim.check is not None:
        agrees = _measure(claim)
    else:
        words = shlex.split(claim.command)
        agrees = subprocess.run([sys.executable, "-m", *words], check=False).returncode == 0
    typer.echo(f"\nrecorded: {claim.figure or 'nothing yet'}\nverdict: {claim.verdict}")
    return agrees


def _measure(claim: Claim) -> bool:
    from halfstep.claims.run import run

    outcome = run(claim)
    rows = []
    for name, agrees in outcome.agreements().items():
        number = claim.numbers.get(name)
        rows.append(
            (
                name,
                f"{outcome.measured[name]:.6g}" if name in outcome.measured else "-",
                f"{number.value:.6g}" if number else "-",
                f"{number.tolerance:g}" if number else "-",
                "yes" if agrees else "NO",
            )
        )
    columns = ["number", "measured", "recorded", "tolerance", "confirmed"]
    show_table(columns, rows, right=columns[1:4])
    return outcome.agrees


def _check(chosen: list[Claim]) -> bool:
    """Measure claims again, one line each; whether all are confirmed."""
    from halfstep.claims.run import run

    refuted = 0
    for claim in chosen:
        outcome = run(claim)
        wrong = [name for name, agrees in outcome.agreements().items() if not agrees]
        typer.echo(f"{'NO ' if wrong else 'yes'}  {claim.id}")
        for name in wrong:
            found = outcome.measured.get(name, "nothing")
            number = claim.numbers.get(name)
            expected = f"{number.value:g} ± {number.tolerance:g}" if number else "nothing"
            fail(f"{claim.id}: {name}: measured {found}, recorded {expected}; `halfstep claims --run {claim.id}`")
        refuted += bool(wrong)
    typer.echo(f"{len(chosen) - refuted} of {len(chosen)} claims confirmed")
    return not refuted
