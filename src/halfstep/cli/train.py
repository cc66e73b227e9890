"""`halfstep train`: train a model under one recipe."""

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
    Resume,
    Seeds,
    Steps,
    Task,
    train_all,
)


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
