"""`halfstep recipes`: list recipes, show every field of one, its plan for a model, and its cost."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli.terminal import Json, answer, stages, table_text
from halfstep.errors import AccountError
from halfstep.text import printable


if TYPE_CHECKING:
    from halfstep.accounting import Cost


def cost(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, my.toml, or module:name.")],
    model: Annotated[
        str, typer.Option(help="What `halfstep memory` takes: llama2-7b, config.json or its folder, module:function.")
    ],
    speeds: Annotated[
        str, typer.Option(help="Relative speeds of matmuls, by the width of the wider operand.")
    ] = "fp16=1,fp8=2,fp4=4",
    batch: Annotated[int, typer.Option(min=1, help="Examples in a batch.")] = 1,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens in an example. Default: the model's context length, at most 2048.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the run, for a recipe whose stages begin at a step.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: multiply-adds.")] = False,
) -> None:
    """Compute the theoretical speed-up of RECIPE over 16-bit training, from its matmuls only; nothing is measured."""
    with stages("loading torch and the model"):
        from halfstep.accounting import HEAD, cost as cost_of, load_subject, sent_a_parameter, speeds_from
        from halfstep.recipe import get_recipe

        given, subject = speeds_from(speeds), load_subject(model)
        made = cost_of(subject, recipe, given, batch=batch, sequence=seq, total_steps=steps)
        sent = {name: sent_a_parameter(get_recipe(recipe), zero) for name, zero in (("ddp", 0), ("fsdp", 3))}
    body = made.without(HEAD)
    tokens = seq or subject.sequence

    data = {
        "model": model, "recipe": made.recipe, "batch": batch, "sequence": tokens, "speeds": given, "sent": sent,
        "remarks": subject.remarks, "products": [asdict(work) for work in made.works],
        **{
            name: {"share": part.share, "speed_up": part.speed_up}
            for name, part in (("all", made), ("without_head", body)) if part.works
        },
    }  # fmt: skip
    examples = f"a batch of {batch}" + (f" x {tokens} tokens" if tokens else "")

    title = (
        f"{printable(subject.name)}, {examples}: {made.multiply_adds:.3g} multiply-adds a step; "
        f"{printable(made.recipe)} at {printable(speeds)}; "
        f"each of N devices sends {sent['ddp']:.4g} bytes a parameter under DDP, {sent['fsdp']:.4g} where weights are "
        "sharded (ZeRO 3), times (N - 1) / N"
    )
    answer(as_json, lambda: data, lambda: "\n".join([title, _table(made, body), *map(printable, subject.remarks)]))


def _table(made: "Cost", body: "Cost") -> str:
    from halfstep.accounting import PASSES

    kinds = dict.fromkeys(work.kind for work in made.works)
    rows = [_row(kind, made, [work for work in made.works if work.kind == kind]) for kind in kinds]
    totals = {"all": made, "without the head": body} if body.works and body.works != made.works else {"all": made}
    of_all = {name: part.multiply_adds / made.multiply_adds for name, part in totals.items()}
    rows += [
        (name, f"{of_all[name]:.1%}", "", "", "", f"{part.share:.1%}", f"{part.speed_up:.2f}")
        for name, part in totals.items()
    ]
    return table_text(["products", "share", *PASSES, "time", "speed-up"], rows, right=["share", "time", "speed-up"])


def _row(kind: str, made: "Cost", works: list[Any]) -> tuple[str, ...]:
    """The row of one kind of matmul: its share of the multiply-adds, the bits in each pass, its time."""
    from halfstep.accounting import OVERHEADS, PASSES, Cost

    part = Cost(made.recipe, made.speeds, tuple(works))
    bits = [sorted({work.bits for work in works if work.step == step}) for step in PASSES]
    widths = [", ".join(f"{width} bits" for width in each) or "-" for each in bits]
    if kind in OVERHEADS:
        return (kind, "", *widths, f"{part.time / made.base:.1%}", "")
    share = part.multiply_adds / made.multiply_adds
    return (kind, f"{share:.1%}", *widths, f"{part.share:.1%}", f"{part.speed_up:.2f}")


recipes = typer.Typer(invoke_without_command=True)
recipes.command()(cost)


@recipes.callback()
def listing(context: typer.Context, as_json: Json = False) -> None:
    """List the recipes, one line each."""
    if context.invoked_subcommand is not None:
        return
    from halfstep.recipe import get_recipe, list_recipes

    members = [get_recipe(name) for name in list_recipes()]
    rows = [(r.name, f"{r.bytes_per_parameter().total:g}", r.summary) for r in members]
    columns = ["recipe", "bytes/param", "what it is"]
    answer(as_json, lambda: [*map(_as_data, members)], lambda: table_text(columns, rows, right=["bytes/param"]))


@recipes.command()
def show(
    name: Annotated[str, typer.Argument(help="A recipe's name, my.toml, or module:name.")], as_json: Json = False
) -> None:
    """Print every field of the recipe, with its bytes per parameter by role."""
    from halfstep.recipe import get_recipe

    recipe = get_recipe(name)
    answer(as_json, lambda: _as_data(recipe), recipe.describe)


@recipes.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="What `halfstep memory` takes: llama2-7b, config.json or its folder, module:function.")
    ],
    recipe: Annotated[str, typer.Option(help="A recipe's name, my.toml, or module:name.")],
    as_json: Json = False,
) -> None:
    """Print what RECIPE does to MODEL: which layers it rounds, to what, on which path; which it does not, and why."""
    with stages("loading torch and the model"):
        from halfstep.accounting import load_subject
        from halfstep.accounting.subject import blank
        from halfstep.preparation import plan as plan_for

        subject = load_subject(model)
        if not subject.has_layers:
            raise AccountError(f"{model} holds tensors and no layers: give the model's config.json, or its folder")
        with blank(subject):
            made = plan_for(subject.build(), recipe)
    lines = [printable(line) for text in (str(made), *subject.remarks) for line in text.split("\n")]
    answer(as_json, lambda: {**made.to_dict(), "remarks": subject.remarks}, lambda: "\n".join(lines))


def _as_data(recipe: Any) -> dict[str, Any]:
    from halfstep.recipe import to_data

    size = recipe.bytes_per_parameter()
    data = to_data(recipe)
    data |= {key: None for key in ("master", "loss_scale") if data[key] == "none"}
    return {**data, "grads": recipe.grad_format, "bytes_per_parameter": {**asdict(size), "total": size.total}}
