"""`halfstep recipes`: the recipes, every field of one, and what it costs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from halfstep.cli.cost import cost
from halfstep.cli.terminal import show_json, show_table, stages
from halfstep.printable import printable


recipes = typer.Typer(
    help="List the recipes; `recipes show NAME` prints every field of one.", invoke_without_command=True
)
recipes.command()(cost)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@recipes.callback()
def listing(context: typer.Context, as_json: Json = False) -> None:
    """List the recipes, one line each."""
    if context.invoked_subcommand is not None:
        return
    from halfstep.recipe import get_recipe, list_recipes

    members = [get_recipe(name) for name in list_recipes()]
    if as_json:
        show_json([_as_data(recipe) for recipe in members])
        return
    show_table(
        ["recipe", "bytes/param", "what it is"],
        [(r.name, f"{r.bytes_per_parameter().total:g}", r.summary) for r in members],
        right=["bytes/param"],
    )


@recipes.command()
def show(
    name: Annotated[str, typer.Argument(help="A recipe's name, my.toml, or module:name.")], as_json: Json = False
) -> None:
    """Print the whole recipe, with its labelled bytes per parameter."""
    from halfstep.recipe import get_recipe

    recipe = get_recipe(name)
    if as_json:
        show_json(_as_data(recipe))
    else:
        typer.echo(recipe.describe())


@recipes.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="What `halfstep memory` takes: llama2-7b, config.json or its folder, module:function.")
    ],
    recipe: Annotated[str, typer.Option(help="A recipe's name, my.toml, or module:name.")],
    as_json: Json = False,
) -> None:
    """Print what RECIPE does to MODEL: which layers it rounds, to what, on which path; what it keeps, and why."""
    with stages() as progress:
        progress("loading torch and the model")
        from halfstep.accounting import load_subject
        from halfstep.accounting.account import blank
        from halfstep.errors import AccountError
        from halfstep.preparation import plan as plan_for

        subject = load_subject(model)
        if not subject.has_layers:
            raise AccountError(f"{model} holds tensors and no layers: give the model's config.json, or its folder")
        with blank(subject):
            made = plan_for(subject.build(), recipe)
    if as_json:
        show_json({**made.to_dict(), "remarks": subject.remarks})
        return
    for line in (str(made), *subject.remarks):
        typer.echo("\n".join(map(printable, line.split("\n"))))


def _as_data(recipe: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from halfstep.recipe import to_data

    size = recipe.bytes_per_parameter()
    data = to_data(recipe)
    data |= {key: None for key in ("master", "loss_scale") if data[key] == "none"}
    return {**data, "grads": recipe.grad_format, "bytes_per_parameter": {**asdict(size), "total": size.total}}
