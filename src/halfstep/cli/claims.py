"""`halfstep claims`: what papers and forums claim, what we measured, and measuring it again."""

import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from halfstep import claims as ledger
from halfstep.claims import Claim
from halfstep.claims.claim import RESULTS, as_data, by_subject, describe, markdown as page
from halfstep.cli.terminal import Json, answer, fail, line_width, table_text
from halfstep.errors import ClaimError


claims = typer.Typer(invoke_without_command=True)


@claims.callback()
def listing(
    context: typer.Context,
    run: Annotated[str | None, typer.Option("--run", metavar="ID", help="Measure one claim again.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Measure the short ones again; compare the others with saved figures.")
    ] = False,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            metavar="FOLDER",
            help="Folder of saved figures, for --check; default: a clone's benchmarks/results.",
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/claims.md.")] = False,
    as_json: Json = False,
) -> None:
    """List the claims, or measure them again. Exit code 1: a number was not confirmed."""
    asked = [run is not None, check, markdown, as_json]
    if sum(asked) > 1 or (any(asked) and context.invoked_subcommand is not None):
        raise ClaimError("found several of --run, --check, --markdown, --json and a command; give one of them")
    if results is not None and not check:
        raise ClaimError("found --results without --check, which alone reads the folder; give both, or neither")
    if context.invoked_subcommand is not None:
        return
    if run is not None:
        raise typer.Exit(0 if _run(ledger.get_claim(run)) else 1)
    if check:
        raise typer.Exit(0 if _check(ledger.load(), results) else 1)
    if markdown:
        sys.stdout.write(page(ledger.load()))
    else:
        answer(as_json, lambda: [as_data(claim) for claim in ledger.load()], lambda: _list(ledger.load()))


@claims.command()
def show(id: Annotated[str, typer.Argument(help="A claim's id.")], as_json: Json = False) -> None:
    """Print one claim in full: its source and conditions, our figure and where it was measured."""
    claim = ledger.get_claim(id)
    answer(as_json, lambda: as_data(claim), lambda: describe(claim, line_width(105)))


def _in_terminal() -> bool:
    return sys.stdout.isatty()


def _list(claims: Sequence[Claim]) -> str:
    """The claims as text: a table; in a terminal, grouped by subject, a line with id and verdict, then the text."""
    if not _in_terminal():
        return table_text(["id", "verdict", "claim"], [(claim.id, claim.verdict, claim.claim) for claim in claims])
    width = max(20, shutil.get_terminal_size().columns - 1)
    fold = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    text = textwrap.TextWrapper(
        width, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    lines = []
    for subject, rows in by_subject(claims).items():
        told = (f"{claim.id}: {claim.verdict}\n{text.fill(claim.claim)}" for claim in rows)
        lines += [typer.style(fold.fill(subject), bold=True), *told, ""]
    return "\n".join(lines)


def _run(claim: Claim) -> bool:
    """Run the claim's command, print its result next to the recorded one, and return whether the claim is confirmed."""
    if not claim.command:
        raise ClaimError(f"claim {claim.id!r} is open and has no command yet. {claim.note}")
    typer.echo(f"$ {claim.command}")
    if claim.check is not None:
        agrees = _measure(claim)
    else:
        agrees = subprocess.run([sys.executable, *_arguments(claim)], check=False).returncode == 0
    typer.echo(f"\nrecorded: {claim.figure or 'nothing yet'}\nverdict: {claim.verdict}")
    return agrees


def _arguments(claim: Claim) -> list[str]:
    """The arguments for Python that run the claim's command."""
    first, *rest = shlex.split(claim.command)
    if first != "python":
        return ["-m", first, *rest]
    if not Path(rest[0]).is_file():
        raise ClaimError(f"{rest[0]} is not here; benchmarks are run in a clone of halfstep: go to its root")
    return rest


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
    print(table_text(columns, rows, right=columns[1:4]))
    return outcome.agrees


def _check(claims: Sequence[Claim], results: Path | None) -> bool:
    """Measure short claims again, compare the others with kept figures, print one line each; return whether all are
    confirmed.

    If no folder of kept figures was given and the default does not exist, those claims are skipped, with a message.
    """
    from halfstep.claims.run import run

    folder = results or Path(RESULTS)
    chosen = [claim for claim in claims if claim.short or claim.files]
    left = [claim for claim in chosen if claim.files and results is None and not folder.is_dir()]
    refuted = 0
    for claim in chosen:
        if claim in left:
            continue
        try:
            outcome = run(claim, folder)
        except ClaimError as error:
            wrong = {"figures": str(error)}
        else:
            wrong = {
                name: f"measured {outcome.measured.get(name, 'nothing')}, recorded {_recorded(claim, name)}"
                for name, agrees in outcome.agreements().items()
                if not agrees
            }
        typer.echo(f"{'NO ' if wrong else 'yes'}  {claim.id}")
        for name, found in wrong.items():
            advice = f"`halfstep claims --run {claim.id}`" if claim.short else "rewrite the row, or find out why"
            fail(f"{claim.id}: {name}: {found}; {advice}")
        refuted += bool(wrong)
    compared = len(chosen) - len(left)
    typer.echo(f"{compared - refuted} of {compared} claims confirmed")
    if left:
        typer.echo(
            f"{len(left)} more have figures of benchmarks, which were not compared: {folder} is not here; "
            "go to the root of a clone of halfstep, or give --results FOLDER",
            err=True,
        )
    return not refuted


def _recorded(claim: Claim, name: str) -> str:
    number = claim.numbers.get(name)
    return f"{number.value:g} ± {number.tolerance:g}" if number else "nothing"
