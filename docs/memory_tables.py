"""Writes src/halfstep/site/memory.json: the rows that it lacks, or with --all every row again (half an hour).

`python docs/memory_tables.py` after a new recipe or architecture.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from halfstep.accounting import architectures
from halfstep.recipe import list_recipes
from halfstep.site import memory


FILE = Path(memory.__file__).with_name("memory.json")


def main(every: bool) -> None:
    """Measure and write, model after model; what is there after an interruption is kept."""
    before = {} if every or not FILE.exists() else memory.kept()
    table = {model: rows for model, rows in before.items() if model in architectures()}
    for model in architectures():
        old = table.get(model, {})
        table[model] = {recipe: old.get(recipe) or memory.measure(model, recipe) for recipe in list_recipes()}
        FILE.write_text(memory.as_text(table), encoding="utf-8")
        print(model, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every row again")
    main(parser.parse_args().all)
