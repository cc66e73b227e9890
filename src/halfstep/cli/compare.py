"""`halfstep compare` and `halfstep train`: train one model under several recipes, side by side, or under one."""

from __future__ import annotations

from typing import Annotated

import typer

from halfstep.cli.training import (
    Batch,
    Context,
    Data,
    Json,
    Margin,
    Model,
    Optimizer,
    Out,
    Rate,
    RecipeRates,
    Resume,
    Seeds,
    Steps,
    Task,
    train_all,
)
from halfstep.lab.experiment import Experiment


_RECIPES = "fp32,bf16-mixed,fp16-mixed,bf16-master,bf16-stochastic,bf16-nomaster,fp16-pure"


def compare(
    ctx: typer.Context,
    recipes: Annotated[
        str,
        typer.Option(
            help="Recipes, separated by commas: names (see `halfstep recipes`), my.toml, module:name, or "
            "one after another: fp8-current until 90% then bf16-mixed.",
        ),
    ] = _RECIPES,
    task: Task = None,
    data: Data = None,
    steps: Steps = None,
    seeds: Seeds = None,
    baseline_seeds: Annotated[
        int | None,
        typer.Option(help=f"Seeds fp32 is trained with, where that is more. Left out: {Experiment.baseline_seeds}."),
    ] = None,
    margin: Margin = None,
    model: Model = None,
    batch: Batch = None,
    context: Context = None,
    lr: Rate = None,
    recipe_lr: RecipeRates = None,
    optimizer: Optimizer = None,
    out: Out = None,
    resume: Resume = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs trained at once, in processes that share the threads.")] = 1,
    as_json: Json = False,
) -> None:
    """Train one model under several recipes: the same first weights, the same batches; then say what each broke."""
    train_all(ctx, "compare", out, resume, as_json, jobs)


def train(
    ctx: typer.Context,
    recipes: Annotated[
        str,
        typer.Option(
            "--recipe",
            help="A recipe: a name (see `halfstep recipes`), my.toml, module:name, or one after another: 'fp8-current "
            "until 90%, then bf16-mixed'.",
        ),
    ] = "bf16-mixed",
    task: Task = None,
    data: Data = None,
    steps: Steps = None,
    seeds: Seeds = None,
    margin: Margin = None,
    model: Model = None,
    batch: Batch = None,
    context: Context = None,
    lr: Rate = None,
    optimizer: Optimizer = None,
    out: Out = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Train a model under one recipe; fp32's cached baseline, where there is one, judges it."""
    train_all(ctx, "train", out, resume, as_json)
