"""`halfstep scales`: the spread of every tensor's values in a training step, next to the ranges of formats."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli.terminal import answer, save_figure, stages, table_text
from halfstep.errors import DataError, ModelError
from halfstep.text import printable


if TYPE_CHECKING:
    from torch import Tensor, nn

    from halfstep.lab.task import Task
    from halfstep.probe import Scales


def scales(
    model: Annotated[
        str,
        typer.Argument(
            help="A config.json or its folder, or an architecture's name (bert-large, llama-7b ...), built with random "
            "weights; module:function or file.py:function; with --task a model of the task."
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option(help="A task, whose data and loss are taken: lm, mlm, vision ... (`halfstep compare`)."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Tensors in .safetensors or .pt; default: random tokens, or the task's data.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Examples in a batch.")] = 4,
    context: Annotated[int, typer.Option(min=1, help="Tokens in an example.")] = 128,
    batches: Annotated[int, typer.Option(min=1, help="Batches to measure and to train on.")] = 1,
    steps: Annotated[
        int, typer.Option(min=0, help="Measure again after so many steps of AdamW, on the same batches.")
    ] = 0,
    lr: Annotated[float, typer.Option(min=0.0, help="Their learning rate.")] = 1e-4,
    unit: Annotated[
        bool,
        typer.Option("--unit", help="Also measure it unit-scaled (`halfstep.unit_scale`)."),
    ] = False,
    to: Annotated[str, typer.Option("--formats", help="Formats to compare the scales with.")] = "fp16,e4m3fn,e5m2",
    seed: Annotated[int, typer.Option(help="Seed of random weights and random data.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: every tensor.")] = False,
    plot: Annotated[str | None, typer.Option(help="Draw it to this file: scales.png, scales.svg.")] = None,
) -> None:
    """Compare the standard deviation of every activation, weight and gradient of MODEL with formats' ranges."""
    with stages("loading torch and the model") as progress:
        from halfstep.probe import scales as measured

        names = [name.strip() for name in to.split(",") if name.strip()]
        if plot is not None:
            from halfstep.probe.spread_plot import figure

            if not Path(plot).parent.is_dir():
                raise ModelError(f"cannot write {plot!r}: its folder does not exist; name one that does")
        subject = _subject(model, task, data, _Sizes(batch, context, batches), seed)
        moments = {}
        for scaled in dict.fromkeys((False, unit)):
            if scaled:
                progress("unit-scaling")
                subject.unit_scale()
            for taken in dict.fromkeys((0, steps)):
                found = measured(
                    subject.model,
                    subject.batches,
                    to=names,
                    loss=None if subject.task is None else subject.task.loss,
                    steps=taken,
                    learning_rate=lr,
                    described=subject.words,
                    progress=progress,
                )
                moments[f"unit-scaled, {found.moment}" if scaled else found.moment] = found
    if plot is not None:
        save_figure(figure(f"{model}: standard deviations", list(moments.items())), plot, "scales", ModelError)
    found_data = [{"moment": moment, **found.to_dict()} for moment, found in moments.items()]
    answer(as_json, lambda: {"model": model, "scales": found_data}, lambda: _text(moments))


@dataclass(frozen=True)
class _Sizes:
    """The number of batches, examples and tokens to run the model on."""

    batch: int
    context: int
    batches: int


_Given = tuple[list[Any], str]
"""Batches, and their description in words."""


@dataclass(frozen=True)
class _Subject:
    """A model, and the batches to run it on."""

    model: "nn.Module"
    batches: list[Any]
    words: str
    """A description of the batches."""
    task: "Task | None" = None

    def unit_scale(self) -> None:
        """Unit-scale the model by its first batch."""
        from halfstep import unit_scale
        from halfstep.lab.optimizer import unit_scale_on
        from halfstep.probe.batch import loss_of_output

        batch = self.batches[0]
        if self.task is not None:
            unit_scale_on(self.model, self.task, batch)
            return
        named = dict(batch) if isinstance(batch, Mapping) else {}
        args = () if named else tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)

        def loss(output: Any) -> "Tensor":
            found, _ = loss_of_output(output)
            assert found is not None  # unit_scale refuses a model that returns no floating tensor
            return found

        unit_scale(self.model, *args, loss=loss, **named)


def _subject(name: str, task: str | None, data: str | None, sizes: _Sizes, seed: int) -> _Subject:
    """The model and batches that MODEL, --task and --data name.

    Raises:
        ModelError, DataError, RunError: there is no such model, data or task.
    """
    from halfstep.probe.batch import is_tensor_file, tensor_batches

    if task is not None:
        if data is not None:
            raise DataError(f"--task {task} brings its own data; leave --data out, or --task")
        return _of_task(name, task, sizes, seed)
    if data is not None and not is_tensor_file(data):
        raise DataError(f"{data}: expected tensors in .safetensors or .pt, by the names of the model's arguments")
    given = None if data is None else (tensor_batches(data), f"the tensors in {data}")
    return (_of_function if ":" in name else _of_config)(name, given, sizes, seed)


def _of_task(name: str, task: str, sizes: _Sizes, seed: int) -> _Subject:
    """A model of a task, with the task's batches and loss."""
    from halfstep.lab.models import build_model
    from halfstep.lab.tasks import experiment_for, get_task

    spec = get_task(task)
    context = {"context": sizes.context} if "context" in spec.options else {}
    opened = spec.open(experiment_for(task, recipes=("fp32",), batch=sizes.batch, **context))
    batches = [opened.batch(seed, step) for step in range(1, sizes.batches + 1)]
    words = f"{sizes.batches} x {opened.count(batches[0])} {spec.facts.unit} of the task {task}"
    return _Subject(build_model(name, opened.models(), seed), batches, words, opened)


def _of_function(name: str, given: _Given | None, sizes: _Sizes, seed: int) -> _Subject:
    """The model that a function returns, with the inputs it returns, or random tokens."""
    import torch

    from halfstep.probe.batch import load_model

    torch.manual_seed(seed)
    loaded = load_model(name)
    if given is None and loaded.inputs:
        given = list(loaded.inputs), "the inputs that came with the model"
    blank = torch.zeros(sizes.batch, sizes.context, dtype=torch.int64, device="cpu")
    return _Subject(loaded.model, *(given or _random(loaded.model, blank, sizes, seed)))


def _of_config(name: str, given: _Given | None, sizes: _Sizes, seed: int) -> _Subject:
    """A model built from a config, with random weights and inputs."""
    import torch

    from halfstep.accounting import load_subject

    subject = load_subject(name)
    if subject.batch is None:
        raise ModelError(
            f"{name} is a checkpoint, which has no forward pass; give its config.json, or module:function that builds "
            "the model and loads it"
        )
    torch.manual_seed(seed)
    model = subject.build()
    sizes = replace(sizes, context=min(sizes.context, subject.longest or sizes.context))
    blank = subject.batch(model, sizes.batch, sizes.context)
    return _Subject(model, *(given or _random(model, dict(blank.named) if blank.named else blank.args, sizes, seed)))


def _random(model: "nn.Module", blank: Any, sizes: _Sizes, seed: int) -> _Given:
    """Random batches shaped like `blank`: token ids or normal values. Arguments that are the same tensor stay the
    same."""
    import torch
    from torch.utils._pytree import tree_map

    tables = [module.num_embeddings for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    generator = torch.Generator().manual_seed(seed)

    def filled() -> Any:
        made: dict[int, Any] = {}

        def fill(x: Any) -> Any:
            if id(x) not in made:
                if not (x.is_floating_point() or tables):
                    raise ModelError(
                        f"{type(model).__name__} has no embedding of tokens, and what it takes is not known; give "
                        "--data, or have the function return (model, inputs)"
                    )

                made[id(x)] = (
                    torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu")
                    if x.is_floating_point()
                    else torch.randint(tables[0], x.shape, generator=generator, dtype=torch.int64, device="cpu")
                )
            return made[id(x)]

        return tree_map(fill, blank)

    kind = f"random tokens, {sizes.batch} x {sizes.context}" if tables else "random normal numbers"
    number = f"{sizes.batches} batch{'es' if sizes.batches > 1 else ''}"
    return [filled() for _ in range(sizes.batches)], f"{number} of {kind}"


def _text(moments: "Mapping[str, Scales]") -> str:
    from halfstep.probe.spread import deviations, shares

    first = next(iter(moments.values()))
    parts = [printable(f"{first.model}, {first.parameters:,} parameters; {first.data}; loss: {first.loss}")]
    for moment, found in moments.items():
        (columns, lines), (names, rows) = deviations(found), shares(found)
        parts += [
            f"\n{moment[0].upper()}{moment[1:]}: standard deviations",
            table_text(columns, [tuple(map(printable, line)) for line in lines], right=columns[2:]),
            "\nof the values other than zero that become zero, that become subnormal; of all, that lie beyond:",
            table_text(names, rows, right=names[1:]),
        ]
    return "\n".join(parts)
