"""`halfstep train`: train a model under one recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from halfstep.cli.training import (
    Batch,
    Context,
    Data,
    Json,
    Model,
    Out,
    Rate,
    Resume,
    Seeds,
    Steps,
    train_all,
)
from halfstep.lab.experiment import Experiment


def train(
    ctx: typer.Context,
    recipes: Annotated[str, typer.Option("--recipe", help="A recipe; see `halfstep recipes`.")] = "bf16-mixed",
    data: Data = None,
    steps: Steps = Experiment.steps,
    seeds: Seeds = Experiment.seeds,
    model: Model = Experiment.model,
    batch: Batch = Experiment.batch,
    context: Context = Experiment.context,
    lr: Rate = Experiment.lr,
    out: Out = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Train a model under one recipe; fp32's cached baseline, where there is one, judges it."""
    train_all(ctx, "train", out, resume, as_json)
