"""docs/distributed.md: what fully_shard shards and gathers under each recipe, written by this file.

python tests/distributed/test_distributed_page.py      # writes the table again
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch.distributed.tensor.placement_types import Shard


sys.path.append(str(Path(__file__).parents[1]))

from halfstep.distributed.sharded import shared
from halfstep.errors import OptimizerError
from halfstep.optim.states import kind_of
from halfstep.recipe import get_recipe, list_recipes
from marked import Marked


ROOT = Path(__file__).parents[2]
TABLE = Marked(
    ROOT / "docs" / "distributed.md",
    "<!-- begin: written by tests/distributed/test_distributed_page.py -->\n",
    "<!-- end -->\n",
)


class Spread(torch.Tensor):
    """A stand-in for a weight of 256 rows sharded over two ranks."""

    placements, device_mesh = (Shard(0),), torch.zeros(2)


def refuses_adam(recipe):
    """Whether sharded moments of Adam raise under the recipe."""
    try:
        for name in ("exp_avg", "exp_avg_sq"):
            kind_of(recipe, name, (256, 256), torch.zeros(256, 256).as_subclass(Spread))
    except OptimizerError:
        return True
    return False


def render():
    """The table, one line for all recipes that are alike."""
    refused = json.loads((ROOT / "tests" / "uses" / "outcomes.json").read_text())["FSDP2"]
    rows, left_out, without_adam = defaultdict(list), [], []
    for name in list_recipes():
        recipe = get_recipe(name)
        if name in refused:
            left_out.append(name)
            continue
        if refuses_adam(recipe):
            without_adam.append(name)
        codes = sorted({q.format.name for rule in recipe.rules if (q := shared(rule.linear)) is not None})
        gathered = f"{', '.join(codes)} codes, bit for bit" if codes else f"{recipe.weights}"
        beside = "none (the shard is the master)" if recipe.weights == "fp32" else recipe.master or "none"
        rows[recipe.weights, beside, recipe.grad_format, gathered].append(name)
    lines = ["| shard | its master | gradients | gathered with `OPERANDS` as | recipes |", "| --- |" + " --- |" * 4]
    lines += [f"| {' | '.join(row)} | {', '.join(f'`{name}`' for name in names)} |" for row, names in rows.items()]
    lines += ["", f"Refused under fully_shard ([why](using.md)): {', '.join(f'`{name}`' for name in left_out)}."]
    few = ", ".join(f"`{name}`" for name in without_adam)
    lines += [f"Refused only with Adam, because one scale covers a whole moment: {few}."]
    return "\n".join(lines) + "\n"


def test_the_table_of_sharded_recipes_is_up_to_date():
    assert TABLE.read() == render()


if __name__ == "__main__":
    TABLE.write(render())
