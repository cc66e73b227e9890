"""docs/distributed.md: what fully_shard shards and gathers under each recipe, written by this file.

python tests/distributed/test_distributed_page.py      # writes the table again
"""

import json
import sys
from collections import defaultdict
from pathlib import Path


sys.path.append(str(Path(__file__).parents[1]))

from halfstep.distributed.sharded import shared
from halfstep.recipe import get_recipe, list_recipes
from marked import Marked


ROOT = Path(__file__).parents[2]
TABLE = Marked(
    ROOT / "docs" / "distributed.md",
    "<!-- begin: written by tests/distributed/test_distributed_page.py -->\n",
    "<!-- end -->\n",
)


def render():
    """A line for all recipes that are alike."""
    refused = json.loads((ROOT / "tests" / "uses" / "outcomes.json").read_text())["FSDP2"]
    rows, left_out = defaultdict(list), []
    for name in list_recipes():
        recipe = get_recipe(name)
        if name in refused:
            left_out.append(name)
            continue
        codes = sorted({q.format.name for rule in recipe.rules if (q := shared(rule.linear)) is not None})
        gathered = f"{', '.join(codes)} codes, no number changes" if codes else f"{recipe.weights}"
        beside = "none, the shard is the master" if recipe.weights == "fp32" else recipe.master or "none"
        rows[recipe.weights, beside, recipe.grad_format, gathered].append(name)
    lines = ["| shard | master of it | gradients | gathered with `OPERANDS` as | recipes |", "| --- |" + " --- |" * 4]
    lines += [f"| {' | '.join(row)} | {', '.join(f'`{name}`' for name in names)} |" for row, names in rows.items()]
    lines += ["", f"Refused under fully_shard ([why](using.md)): {', '.join(f'`{name}`' for name in left_out)}."]
    return "\n".join(lines) + "\n"


def test_the_table_of_sharded_recipes_is_what_recipes_say():
    assert TABLE.read() == render()


if __name__ == "__main__":
    TABLE.write(render())
