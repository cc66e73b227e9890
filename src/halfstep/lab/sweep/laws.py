"""Scaling laws from a sweep's cells: their sizes, tokens, bits and losses; what rounding a trained model does to it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import RunError
from halfstep.lab.compare import Comparison
from halfstep.lab.folder import read_json, write_json
from halfstep.lab.sweep.folder import FINISHED, Cell, SweepFolder
from halfstep.lab.sweep.report import Outcome, outcomes
from halfstep.lab.sweep.run import Cells
from halfstep.law import Cell as LawCell, Damage
from halfstep.nn import quantize_model
from halfstep.recipe import Recipe, from_data, get_recipe, integer_weights


def finished(folder: SweepFolder) -> list[Outcome]:
    """The cells that finished, each at the best learning rate of its group: the same model, steps, recipe and seed."""
    sweep = folder.sweep()
    points = sweep.points()
    best: dict[tuple[Any, ...], Outcome] = {}
    for found in outcomes(folder, sweep):
        rest = tuple(getattr(points[found.point], axis) for axis in sweep.grid if axis != "lr")
        key = (*rest, found.recipe, found.seed)
        ended = found.status == FINISHED and found.loss is not None
        if ended and (key not in best or (found.loss or 0.0) < (best[key].loss or 0.0)):
            best[key] = found
    return list(best.values())


def law_cells(paths: Sequence[Path]) -> list[LawCell]:
    """The cells of sweeps that differ in sizes, tokens and widths, as a law is fitted to them.

    Raises:
        RunError: a folder is no sweep, or a recipe rounds more than its weights: no width of weights says what it does.
    """
    return [
        LawCell(
            float(cell.parameters or 0),
            float(cell.tokens),
            weight_bits(recipe_of(folder, cell)),
            float(cell.loss or 0.0),
        )
        for folder in map(SweepFolder, paths)
        for cell in finished(folder)
    ]


def damages(paths: Sequence[Path]) -> list[Damage]:
    """What `measure_damage` wrote beside the cells."""
    return [
        Damage(float(cell.parameters or 0), float(cell.tokens), float(bits), damage)
        for folder in map(SweepFolder, paths)
        for cell in finished(folder)
        for bits, damage in _damage(folder, cell).items()
    ]


def _damage(folder: SweepFolder, cell: Outcome) -> dict[str, float]:
    """By width, what was measured of a cell."""
    file = folder.run((cell.point, cell.recipe, cell.seed)) / "rounded.json"
    return read_json(file)["damage"] if file.is_file() else {}


def weight_bits(recipe: Recipe) -> float | None:
    """The bits of the weights in the forward; None where they are whole, 16 bits included.

    Raises:
        RunError: it rounds activations or gradients as well.
    """
    rounds = [rule.linear for rule in recipe.rules if rule.linear.rounds]
    if not rounds:
        return None
    if len(rounds) > 1 or rounds[0].output.lhs is not None or rounds[0].output.rhs is None:
        raise RunError(
            f"recipe {recipe.name!r} rounds more than its weights; a fit takes recipes that round nothing, or weights "
            "alone: weights-int4"
        )
    return float(rounds[0].output.rhs.format.bits)


def recipe_of(folder: SweepFolder, cell: Outcome) -> Recipe:
    """The recipe that a cell was trained under."""
    recorded = folder.point(cell.point).recipes().get(cell.recipe)
    return from_data(recorded, get_recipe) if recorded else get_recipe(cell.recipe)


def measure_damage(path: Path, bits: Sequence[int], watch: Callable[[Cell], None] = lambda cell: None) -> int:
    """Round the weights of every model that finished to each width, and write rounded.json beside its run; the count.

    Each weight but the head's in `weights-intN`'s integers, to nearest, with no data: the damage is the validation loss
    afterwards less that of the same model in float32. Widths that are there are not measured again.

    Raises:
        RunError: the folder is no sweep.
        CheckpointError: a checkpoint is gone or damaged.
    """
    folder = SweepFolder(path)
    cells, every = Cells(path, folder.sweep()), finished(folder)
    for found in every:
        cell = found.point, found.recipe, found.seed
        known = _damage(folder, found)
        if missing := [width for width in bits if str(width) not in known]:
            losses = dict(_rounded(cells.comparison(found.point), found, missing))
            write_json(folder.run(cell) / "rounded.json", {"damage": {**known, **losses}})
        watch(cell)
    return len(every)


def _rounded(comparison: Comparison, found: Outcome, bits: Sequence[int]) -> Iterator[tuple[str, float]]:
    trainer = comparison.trainer(found.recipe, found.seed)
    whole = _loss(comparison, trainer.trained())
    for width in bits:
        model = trainer.trained()
        quantize_model(model, integer_weights(width))
        yield str(width), _loss(comparison, model) - whole


@torch.no_grad()
def _loss(comparison: Comparison, model: torch.nn.Module) -> float:
    model.eval()
    losses = [float(comparison.task.loss(model, batch)) for batch in comparison.task.held_out()]
    return sum(losses) / len(losses)
