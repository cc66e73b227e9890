"""Faults that the tests must find: each is put into a copy of the source, and the tests named for it must fail.

`make mutants` runs them all, on demand: half an hour. A mutant replaces a text in one file (`mutants.toml`). Survivors
are named: what they change is no longer tested. Arguments are names, or parts of names, of mutants."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path


TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCE = ROOT / "src"
PASSED, FAILED = 0, 1  # pytest's exit codes
_LONGEST = 900  # seconds


@dataclass(frozen=True)
class Mutant:
    """A replacement of `old` by `new` in one source file; `tests` are the files or folders that must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def mistakes(self, source: Path) -> list[str]:
        """Why this mutant cannot be tried; empty if it can."""
        path = source / "halfstep" / self.file
        missing = [test for test in self.tests if not (TESTS / test).exists()]
        found = path.read_text().count(self.old) if path.is_file() else 0
        return [
            *(f"{self.name}: there is no tests/{test}; name the tests that must notice" for test in missing),
            *([] if found == 1 else [f"{self.name}: its text stands {found} times in {self.file}, expected once"]),
        ]

    def apply(self, source: Path) -> None:
        """Replace the text in the copy of the source."""
        path = source / "halfstep" / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


def load(names: Sequence[str] = ()) -> list[Mutant]:
    """The mutants whose names contain one of `names`, or all."""
    rows = tomllib.loads((TESTS / "mutants.toml").read_text())["mutant"]
    mutants = [Mutant(row["name"], row["file"], row["old"], row["new"], tuple(row["tests"])) for row in rows]
    return [mutant for mutant in mutants if not names or any(name in mutant.name for name in names)]


def mistakes(mutants: Iterable[Mutant]) -> list[str]:
    """What is wrong with the list of mutants itself."""
    names = [mutant.name for mutant in mutants]
    twice = [f"{name}: two mutants have this name" for name in sorted(set(names)) if names.count(name) > 1]
    return twice + [mistake for mutant in mutants for mistake in mutant.mistakes(SOURCE)]


def survives(mutant: Mutant) -> bool:
    """Whether the mutant's tests pass in spite of it.

    Raises:
        RuntimeError: they neither passed nor failed, so the result is unknown.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(SOURCE, source)  # a changed kernel has another hash and is compiled again
        mutant.apply(source)
        paths = [str(TESTS / test) for test in mutant.tests]
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *paths]
        environment = {**os.environ, "PYTHONPATH": str(source)}
        try:
            ran = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LONGEST, check=False
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{mutant.name}: its tests did not end in {_LONGEST} seconds") from None
    if ran.returncode not in (PASSED, FAILED) or "ERROR collecting" in ran.stdout:
        said = ran.stdout[-2000:] + ran.stderr[-500:]
        raise RuntimeError(f"{mutant.name}: pytest exited with {ran.returncode}:\n{said}")
    lives = ran.returncode == PASSED
    print(f"{'SURVIVED' if lives else 'killed'}: {mutant.name}{_first_failure(ran.stdout)}", flush=True)
    return lives


def _first_failure(output: str) -> str:
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return f" ({failed[0].split(' - ')[0].split(maxsplit=1)[1]})" if failed else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutants whose names contain one of these (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time (default: one a core)")
    arguments = parser.parse_args()
    mutants = load(arguments.names)
    if not mutants or (wrong := mistakes(mutants)):
        sys.exit("\n".join(wrong) if mutants else f"no mutant is called {' or '.join(arguments.names)}")
    with ThreadPoolExecutor(arguments.jobs) as pool:
        alive = [mutant.name for mutant, lives in zip(mutants, pool.map(survives, mutants), strict=True) if lives]
    print(f"{len(mutants) - len(alive)} of {len(mutants)} mutants killed")
    sys.exit(f"survivors: {', '.join(alive)}" if alive else 0)


if __name__ == "__main__":
    main()
