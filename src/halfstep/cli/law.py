"""`halfstep law`: predictions of scaling laws for precision, and fits of their constants to a sweep."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli.compare import Json
from halfstep.cli.terminal import answer, table_text, write_text
from halfstep.errors import LawError


if TYPE_CHECKING:
    from halfstep.law import Law

law = typer.Typer(no_args_is_help=True)


@law.command("predict")
def predict(
    parameters: Annotated[float | None, typer.Option(help="Parameters, such as 1e9.")] = None,
    tokens: Annotated[float | None, typer.Option(help="Tokens trained on.")] = None,
    bits: Annotated[
        float | None,
        typer.Option(help="Bits of every part in training; default: 16 bits, which count as full precision."),
    ] = None,
    weights: Annotated[float | None, typer.Option(help="Bits of the weights only.")] = None,
    post_bits: Annotated[
        float | None, typer.Option(help="Bits that the weights are rounded to after training.")
    ] = None,
    compute: Annotated[
        float | None, typer.Option(help="Floating point operations: the best bits, parameters and tokens for them.")
    ] = None,
    constants: Annotated[
        Path | None, typer.Option("--law", help="A file written by `law fit --out`; default: Kumar et al.'s constants.")
    ] = None,
    without_offsets: Annotated[
        bool,
        typer.Option("--without-offsets", help="Use the form of the paper's main text, without offsets."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict a model's loss from its parameters, tokens and bits; or the best choice of these for a compute budget.

    The constants were fitted to other models and data: use the trend, not the value.
    """
    from halfstep.law import KUMAR

    used = KUMAR if constants is None else _read(constants)
    used = used.without_offsets() if without_offsets else used
    if (compute is None) == (parameters is None or tokens is None):
        raise LawError("give --parameters and --tokens for a loss, or --compute for the best bits")
    if compute is not None:
        found = dict(zip(("bits", "parameters", "tokens"), used.best_for(compute), strict=True))
        found["loss"] = used.loss(found["parameters"], found["tokens"], dict.fromkeys(used.widths, found["bits"]))
    else:
        found = _predicted(used, parameters or 0.0, tokens or 0.0, bits, weights, post_bits)
    lines = [f"{name.replace('_', ' '):<36} {value:.4g}" for name, value in found.items()]
    lines.append(f"{'constants':<36} {used.source}")
    answer(as_json, lambda: {"law": used.source, **found}, lambda: "\n".join(lines))


def _predicted(
    law: "Law", parameters: float, tokens: float, bits: float | None, weights: float | None, post: float | None
) -> dict[str, float]:
    widths = {} if bits is None else dict.fromkeys(law.widths, bits)
    widths |= {} if weights is None else {"weights": weights}
    if post is not None and widths:
        raise LawError("--post-bits is of a model trained in 16 bits: leave --bits and --weights out")
    found = {"loss": law.loss(parameters, tokens, widths, post)}
    if widths:
        found |= {
            "loss_in_16_bits": law.loss(parameters, tokens),
            "effective_parameters": parameters * law.share(widths),
        }
    if post is not None:
        harmful = law.harmful_tokens(parameters, post)
        found |= {"of_it_by_rounding": law.damage(parameters, tokens, post), "tokens_beyond_which_more_harm": harmful}
    return found


@law.command("fit")
def fit(
    folders: Annotated[list[Path], typer.Argument(metavar="SWEEP...", help="Folders of sweeps.")],
    out: Annotated[Path | None, typer.Option(help="A file for the constants, which `predict --law` reads.")] = None,
    resamples: Annotated[int, typer.Option(min=0, help="Number of resamples of the runs for the intervals.")] = 200,
    as_json: Json = False,
) -> None:
    """Fit the law to sweeps over sizes, steps and widths of weights, and to their measured rounding damage."""
    from halfstep.lab.sweep.run import damages, law_cells
    from halfstep.law import fit_damage, fit_loss

    fits = {"loss": fit_loss(law_cells(folders), resamples)}
    rounded = damages(folders)
    positive = [damage for damage in rounded if damage.damage > 0]
    unfitted = None
    if positive:
        try:
            fits["damage"] = fit_damage(positive, resamples)
        except LawError as error:
            unfitted = f"the damage of rounding is not fitted: {error}"
    data: dict[str, Any] = {name: found.to_dict() for name, found in fits.items()}
    data |= {"damages_left_out": len(rounded) - len(positive), "damage_not_fitted": unfitted}
    data["law"] = asdict(fits["loss"].law(fits.get("damage")))
    if out is not None:
        write_text(out, json.dumps(data, indent=2) + "\n", LawError)
    answer(as_json, lambda: data, lambda: _text(fits, data, len(rounded)))


def _text(fits: dict[str, Any], data: dict[str, Any], damages: int) -> str:
    parts = []
    for name, found in fits.items():
        rows = [[key, f"{value:.4g}", _ends(found.intervals.get(key))] for key, value in found.constants.items()]
        constants = table_text(["constant", "value", "95% interval"], rows, right=["value", "95% interval"])
        parts.append(f"{name}: {found.cells} runs, R2 {found.r2:.4f}, residual {found.residual:.3g}\n{constants}\n")
    if left_out := data["damages_left_out"]:
        parts.append(f"{left_out} of {damages} damages are not positive and have no logarithm: the fit left them out")
    return "\n".join([*parts, *filter(None, [data["damage_not_fitted"]])])


@law.command("round")
def round_(
    folder: Annotated[Path, typer.Argument(metavar="SWEEP", help="A sweep's folder.")],
    bits: Annotated[str, typer.Option(help="Widths, by commas.")] = "2,3,4",
    as_json: Json = False,
) -> None:
    """Round the weights of every finished model of a sweep, and measure the rise of the loss, which `fit` uses."""
    from halfstep.lab.sweep.run import damages, measure_damage

    try:
        widths = [int(part) for part in bits.split(",")]
    except ValueError:
        raise LawError(f"--bits {bits}; expected integers separated by commas, as in 2,3,4") from None
    measure_damage(folder, widths)
    rows = [asdict(damage) for damage in damages([folder])]
    forms = {"parameters": "{:.4g}", "tokens": "{:.4g}", "bits": "{:g}", "damage": "{:+.5f}"}
    table = [[form.format(row[name]) for name, form in forms.items()] for row in rows]
    answer(as_json, lambda: rows, lambda: table_text([*forms], table, right=forms))


def _read(path: Path) -> "Law":
    from halfstep.law import Law, PostTraining, Width

    try:
        data: dict[str, Any] = json.loads(path.read_text())["law"]
        widths = {part: Width(**width) for part, width in data.pop("widths").items()}
        post = data.pop("post")
        return Law(widths=widths, post=PostTraining(**post) if post else None, **data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LawError(
            f"{path} is no law that `halfstep law fit --out` wrote ({type(error).__name__}: {error})"
        ) from error


def _ends(ends: tuple[float, float] | None) -> str:
    return "-" if ends is None else f"{ends[0]:.4g} to {ends[1]:.4g}"
