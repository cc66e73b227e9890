"""`halfstep mismatch`: how far the policy that is trained is from the one that generates."""

from __future__ import annotations

from typing import Annotated

import typer

from halfstep.cli.probe import batches_for
from halfstep.cli.terminal import show_json, stages
from halfstep.errors import RecipeError
from halfstep.printable import printable


def mismatch(
    policy: Annotated[str, typer.Argument(help="A Hugging Face folder, module:function or file.py:function.")],
    train: Annotated[str, typer.Option(help="The recipe that it is trained under.")] = "bf16-mixed",
    rollout: Annotated[
        str | None, typer.Option(help="The recipe that it generates under; left out: --train's.")
    ] = None,
    exported: Annotated[
        str | None, typer.Option(help="A folder that `halfstep export` wrote, which generates instead.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows in each of the rollout's calls; left out: --batch.")
    ] = None,
    padding: Annotated[int, typer.Option(min=0, help="Tokens of padding after each of the rollout's rows.")] = 0,
    clip: Annotated[float, typer.Option(help="Importance ratios outside 1 - clip to 1 + clip are counted.")] = 0.2,
    data: Annotated[
        str | None, typer.Option(help="Text, or tensors in .safetensors or .pt; left out: Python's standard library.")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Batches to run.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Examples in a batch.")] = 4,
    context: Annotated[int, typer.Option(min=1, help="Tokens in an example.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: every module.")] = False,
) -> None:
    """How far are POLICY's next-token distributions under two recipes: KL, importance ratios, and where it begins.

    Exit code: 0 where they are the same, else 1.
    """
    if rollout is not None and exported is not None:
        raise RecipeError("--rollout and --exported both given; expected one of them: what generates")
    with stages() as progress:
        progress("loading torch and the model")
        from halfstep.probe import mismatch as measured
        from halfstep.probe.inputs import load_model
        from halfstep.recipe import get_recipe
        from halfstep.serving import from_pretrained

        names = [get_recipe(name).name for name in (train, rollout or train)]  # a wrong one is said first
        loaded = load_model(policy)
        found, described = batches_for(loaded, data, batches, batch, context)
        progress("comparing")
        served = names[1] if exported is None else from_pretrained(exported)
        report = measured(loaded.model, found, names[0], served, rows=rows, padding=padding, clip=clip)
    if as_json:
        show_json({"policy": policy, "data": described, **report.to_dict()})
    else:
        typer.echo(printable(f"{described}:"))
        typer.echo("\n".join(map(printable, str(report).split("\n"))))
    raise typer.Exit(int(report.kl_most > 0 or report.difference_most > 0))
