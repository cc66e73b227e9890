"""Changes from every recipe to every other with `recipe_change="allow"`, and the tables of what each change loses.

python tests/uses/changes.py --write    # the tables of docs/changing.md

Losses are found by comparing values before and after: weights with their masters (`optimizer.full`), moments in
float32, scaling states and the loss scale."""

import copy
import re
import sys
import warnings
from functools import cache
from pathlib import Path


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

import pytest  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import halfstep  # noqa: E402
from marked import Marked  # noqa: E402
from tiny import EVERY, Gated, adamw, train  # noqa: E402


PAGE = HERE.parent.parent / "docs" / "changing.md"
TABLE = Marked(PAGE, "<!-- begin: written by tests/uses/changes.py -->\n", "<!-- end -->\n")
LOSSES = {
    "Weights and masters": "dropped, and go on as their stored|weights that were kept in more bits are rounded",
    "Moments": "exp_avg.* is rounded|moments and step counts",
    "Scaling states": "scaling states (start over|are dropped)",
    "Loss scale": "the loss scale(, .*, is dropped| begins anew| starts over)",
}
"""What a change may lose, and a pattern of the warning that must then be given."""


def build(seed=0):
    """A small model, with matrices large enough for 8-bit moments, and a value that bf16 can represent and fp16
    cannot."""
    torch.default_generator.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), Gated(64, 96), nn.LayerNorm(64), nn.Linear(64, 4))
    model.register_parameter("spare", nn.Parameter(torch.tensor([1.5 * 2.0**-30])))
    return model


@cache
def saved(name):
    """The state dicts of a model after some steps under a recipe, and its `values`."""
    model = build()
    parts = halfstep.prepare(model, adamw(model, lr=1e-3), name, generator=3)
    train(*parts, 8)
    return tuple(copy.deepcopy(part.state_dict()) for part in parts), values(*parts)


def started(name, **options):
    model = build(1)
    return halfstep.prepare(model, adamw(model), name, generator=4, **options)


def values(model, optimizer, scaler):
    """The values that belong to each name of `LOSSES`."""
    try:
        moments = optimizer.float32_state_dict()["state"]
    except halfstep.HalfstepError:  # of a subspace
        moments = copy.deepcopy(optimizer.state_dict()["state"])
    kept = ("exp_avg", "exp_avg_sq", "step", "projector")
    found = (
        [optimizer.full(parameter) for parameter in model.parameters()],
        {number: {name: state[name] for name in kept if name in state} for number, state in moments.items()},
        scaler.state_dict()["halfstep"].get("scaling"),
        scaler.get_scale() if scaler.is_enabled() else None,
    )
    return dict(zip(LOSSES, found, strict=True))


def equal(one, two):
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.shape == two.shape and torch.equal(one.float(), two.float())
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    return all(map(equal, one, two)) if isinstance(one, list) else one == two


def lost(name, other):
    """The names of what a change from one recipe to the other loses, after checking that each loss is warned of.

    Raises: AssertionError if a loss is not warned of, the change is made without being allowed, or training fails
    afterwards."""
    states, was = saved(name)
    refusing = started(other)
    for part, state in zip(refusing[1:], states[1:], strict=True):
        with pytest.raises(halfstep.errors.RecipeError, match=f"'{name}', and this run follows '{other}'"):
            part.load_state_dict(copy.deepcopy(state))
    parts = started(other, recipe_change="allow")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(copy.deepcopy(state))
    now, warned = values(*parts), " ".join(str(warning.message) for warning in said)
    found = tuple(what for what in LOSSES if not equal(was[what], now[what]))
    for what in found:
        assert re.search(LOSSES[what], warned), f"{name} to {other}: {what} lost, and warned was: {warned}"
    assert all(torch.tensor(train(*parts, 1)).isfinite()), f"{name} to {other}: the next step is not finite"
    return found


def render(outcomes):
    """A table for each loss. Recipes that behave alike in it, as source and as target, share a row and a column."""
    lines = []
    for what in LOSSES:

        def loses(one, other, what=what):
            return what in outcomes[one, other]

        groups = []
        for name in EVERY:
            for group in groups:
                first, rest = group[0], [other for other in EVERY if other not in (name, group[0])]
                same = all(loses(name, o) == loses(first, o) and loses(o, name) == loses(o, first) for o in rest)
                inside = loses(*group[:2]) if group[1:] else loses(name, first)
                if same and loses(name, first) == loses(first, name) == inside:
                    group.append(name)
                    break
            else:
                groups.append([name])
        letters = [chr(ord("A") + i) for i in range(len(groups))]
        lines += [f"### {what}", "", f"| from, to | {' | '.join(letters)} |", "| --- |" + " --- |" * len(groups)]
        for letter, group in zip(letters, groups, strict=True):
            cells = []
            for other in groups:
                pair = next(((one, two) for one in group for two in other if one != two), None)
                cells.append("" if pair is None else "lost" if loses(*pair) else "kept")
            lines.append(f"| {letter} | {' | '.join(cells)} |")
        named = [", ".join(f"`{name}`" for name in group) for group in groups]
        lines += ["", *(f"- {letter}: {names}" for letter, names in zip(letters, named, strict=True)), ""]
    return "\n".join(lines)


def all_losses():
    torch.set_num_threads(1)
    return {(name, other): lost(name, other) for name in EVERY for other in EVERY if name != other}


if __name__ == "__main__":
    text = render(all_losses())
    if "--write" in sys.argv:
        TABLE.write(text)
    print(text)
