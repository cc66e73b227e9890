"""`halfstep probe`: is this model safe in fp16? `halfstep mismatch`: how far a policy is from its rollout."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli.terminal import answer, stages, table_text
from halfstep.errors import KnowledgeBaseError, ModelError, RecipeError
from halfstep.kb import Verdict, check
from halfstep.kb.verdict import because
from halfstep.text import printable


if TYPE_CHECKING:
    from halfstep.probe import ProbeReport
    from halfstep.probe.observe import Counts, Range


_ROWS = 12
_COLUMNS = ("largest", "bits left", "beyond", "subnormal", "vanish", "error", "tensor")


def probe(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, module:function or file.py:function.")],
    to: Annotated[
        str, typer.Option("--to", help="A format: fp16, bf16, e4m3fn ... (see `halfstep formats`).")
    ] = "fp16",
    data: Annotated[
        str | None,
        typer.Option(help="Text, or tensors in .safetensors or .pt; default: Python's standard library."),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Batches to run.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Examples in a batch.")] = 4,
    context: Annotated[int, typer.Option(min=1, help="Tokens in an example.")] = 128,
    train_steps: Annotated[
        int, typer.Option(min=0, help="Train this many steps of AdamW in fp32, then measure again.")
    ] = 0,
    lr: Annotated[float, typer.Option(min=0.0, help="Their learning rate.")] = 1e-4,
    loss_scale: Annotated[
        float | None, typer.Option(help="A constant loss scale; default: the recipe's, for fp16 dynamic from 65536.")
    ] = None,
    write_recipe: Annotated[
        Path | None,
        typer.Option(help="Write the recipe that passes to this TOML file: the format's own, or the suggested one."),
    ] = None,
    cast_as: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="half: cast like model.half(); recipe: the format's own recipe; or a recipe's name. Default: both.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Is MODEL safe in a number format, in the forward and in the backward pass?

    Exit code 0: safe, 1: not safe, 2: no answer.
    """
    _check(write_recipe, loss_scale)
    try:
        with stages("loading torch and the model") as progress:
            from halfstep.probe import probe_model, target
            from halfstep.probe.batch import load_model

            target(to, loss_scale)  # raises for a wrong name before the model is loaded
            loaded = load_model(model)
            found, described = batches_for(loaded, data, batches, batch, context)
            report = probe_model(
                loaded.model,
                to,
                data=found,
                loss_scale=loss_scale,
                train_steps=train_steps,
                cast_as=cast_as,
                learning_rate=lr,
                described=described,
                progress=progress,
            )
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was changed", err=True)
        raise typer.Exit(130) from None
    known = _known(model, report.target.format.name)
    said = None if known is None else known.verdict
    answer(as_json, lambda: {"model": model, **report.to_dict(), "knowledge_base": said}, lambda: _text(report, known))
    if write_recipe is not None:
        _write(report, write_recipe)
    raise typer.Exit({"safe": 0, "UNSAFE": 1}.get(report.verdict, 2))


def _check(write_recipe: Path | None, loss_scale: float | None) -> None:
    if loss_scale is not None and not 0 < loss_scale < float("inf"):
        raise ModelError(f"--loss-scale {loss_scale:g} given; expected a positive number, such as 1024")
    if write_recipe is not None and not write_recipe.parent.is_dir():
        raise RecipeError(f"cannot write {str(write_recipe)!r}: its folder does not exist; name one that does")


def batches_for(loaded: Any, data: str | None, batches: int, batch: int, context: int) -> tuple[list[Any], str]:
    """The batches to run the model on, and their description in words."""
    from halfstep.lab.task import load_corpus
    from halfstep.probe.batch import is_tensor_file, tensor_batches, text_batches

    if data is not None and is_tensor_file(data):
        return tensor_batches(data), f"the tensors in {data}"
    if data is None and loaded.inputs:
        return list(loaded.inputs), "the inputs that came with the model"
    made, how = text_batches(load_corpus(data, 0).train, loaded, batches, batch, context)
    return made, f"{data or 'the Python standard library'}, {how}"


def _known(model: str, format: str) -> Verdict | None:
    """The knowledge base's verdict for the model in that format; None if it lacks the model or the format."""

    with suppress(KnowledgeBaseError):
        verdict = check(model, format)
        if verdict.answer.known or verdict.failures:
            return verdict
    return None


def _text(report: "ProbeReport", known: Verdict | None) -> str:
    lines = [*map(printable, str(report).split("\n"))]
    if known is not None:
        ids = ", ".join(entry.id for entry in known.answer.entries) or "failure reports only"
        lines += [f"the knowledge base ({ids}) says: {known.verdict}"]
        lines += [f"  {printable(because(reason))}" for reason in known.reasons]
        if known.failures:
            lines.append(f"  {len(known.failures)} reports of failures: halfstep kb check MODEL --use {known.use}")
    rows = [tuple(map(printable, row)) for row in _rows(report, _ROWS)]
    return "\n".join([*lines, "", table_text(_COLUMNS, rows, right=_COLUMNS[:-1])])


def _write(report: "ProbeReport", path: Path) -> None:
    from halfstep.recipe.data import to_toml

    passed = report.trial if report.recipe_safe else report.suggestion
    if passed is None:
        typer.echo(f"{path} was not written: no recipe passed", err=True)
        return
    try:
        path.write_text(to_toml(passed.recipe), encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"cannot write {str(path)!r}: {error.strerror}; name a file that can be written") from None
    typer.echo(f"wrote {path}", err=True)


def mismatch(
    policy: Annotated[str, typer.Argument(help="A Hugging Face folder, module:function or file.py:function.")],
    train: Annotated[str, typer.Option(help="The recipe that it is trained under.")] = "bf16-mixed",
    rollout: Annotated[str | None, typer.Option(help="The recipe that it generates under; default: --train's.")] = None,
    exported: Annotated[
        str | None, typer.Option(help="A folder written by `halfstep export`; it generates instead of a recipe.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows in each of the rollout's calls; default: --batch.")
    ] = None,
    padding: Annotated[int, typer.Option(min=0, help="Tokens of padding after each of the rollout's rows.")] = 0,
    clip: Annotated[float, typer.Option(help="Importance ratios outside 1 - clip to 1 + clip are counted.")] = 0.2,
    data: Annotated[
        str | None, typer.Option(help="Text, or tensors in .safetensors or .pt; default: Python's standard library.")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Batches to run.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Examples in a batch.")] = 4,
    context: Annotated[int, typer.Option(min=1, help="Tokens in an example.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: every module.")] = False,
) -> None:
    """Compare POLICY's next-token distributions under two recipes: KL, importance ratios, first module that differs.

    Exit code: 0 if they are the same, else 1.
    """
    if rollout is not None and exported is not None:
        raise RecipeError("--rollout and --exported both given; expected one of them: what generates")
    with stages("loading torch and the model") as progress:
        from halfstep.probe import mismatch as measured
        from halfstep.probe.batch import load_model
        from halfstep.recipe import get_recipe
        from halfstep.serving import from_pretrained

        names = [get_recipe(name).name for name in (train, rollout or train)]  # raises for a wrong name first
        loaded = load_model(policy)
        found, described = batches_for(loaded, data, batches, batch, context)
        progress("comparing")
        served = names[1] if exported is None else from_pretrained(exported)
        report = measured(loaded.model, found, names[0], served, rows=rows, padding=padding, clip=clip)
    lines = [printable(line) for line in (f"{described}:", *str(report).split("\n"))]
    answer(as_json, lambda: {"policy": policy, "data": described, **report.to_dict()}, lambda: "\n".join(lines))
    raise typer.Exit(int(report.kl_most > 0 or report.difference_most > 0))


def _rows(report: "ProbeReport", count: int) -> list[tuple[str, ...]]:
    """The worst tensors, one row each with the columns of `_COLUMNS`. A tensor passed on by several modules is shown
    once."""
    distinct: dict[Counts, Range] = {}
    for found in report.worst():
        distinct.setdefault(found.counts, found)
    return [_row(found, report) for found in list(distinct.values())[:count]]


def _row(found: "Range", report: "ProbeReport") -> tuple[str, ...]:
    error = report.trial.errors.get(found.site.module) if found.site.role == "output" else None
    return (
        f"{found.counts.largest:.4g}",
        f"{found.headroom:.1f}",
        *map(_share, (found.share_beyond, found.share_subnormal, found.share_vanished)),
        "-" if error is None else f"{error:.2g}",
        str(found.site),
    )


def _share(value: float) -> str:
    return "-" if value == 0 else f"{value:.2g}" if value < 0.001 else f"{value:.1%}"
