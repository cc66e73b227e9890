"""Ten thousand broken checkpoints of every kind are read or rejected, within limits of memory and time.

A copy fails if it is neither read nor rejected with a CheckpointError, takes more than 300 MB or 10 seconds, or if
reading it runs, imports or writes anything. Failing copies are kept.

    python tests/exhaustive/readers.py [--count N] [--seed S]
"""

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/inspection"))

from kinds import KINDS, scan  # noqa: E402
from mutations import mutate  # noqa: E402
from watching import nothing_but_reading  # noqa: E402

from halfstep.errors import CheckpointError  # noqa: E402
from halfstep.inspection import open_checkpoint  # noqa: E402 - after the path to the kinds


MEGABYTES, SECONDS = 300, 10


def peak() -> int:
    """The peak resident memory since `reset`, in megabytes."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) >> 10


def reset() -> None:
    """Reset the peak resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def outcome(path: Path) -> str:
    """The result for one copy; "read" and "refused" are passes."""
    reset()
    before, began = peak(), time.perf_counter()
    try:
        with nothing_but_reading():
            scan(open_checkpoint(path))
        found = "read"
    except CheckpointError:
        found = "refused"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    used, seconds = peak() - before, time.perf_counter() - began
    if used > MEGABYTES or seconds > SECONDS:
        found = f"{used} MB and {seconds:.0f} s"
    return found


def check(kind: str, count: int, random: Random, home: Path) -> Counter[str]:
    """Break a checkpoint of this kind `count` times and count the outcomes."""
    path = KINDS[kind](home)
    folder = path if path.is_dir() else path.parent
    files = {file: file.read_bytes() for file in sorted(folder.iterdir())}
    found: Counter[str] = Counter()
    for number in range(count):
        file = random.choice(list(files))
        broken = mutate(random, file.name, files[file])
        file.write_bytes(broken)
        became = outcome(path)
        if file.read_bytes() != broken or set(folder.iterdir()) != set(files):
            became = "something was written"
        if became not in ("read", "refused"):
            kept = Path(tempfile.gettempdir()) / f"broken-{kind}-{number}-{file.name}"
            kept.write_bytes(broken)
            print(f"{kind} {number}: {became}; kept as {kept}")
        found[became] += 1
        file.write_bytes(files[file])
    return found


def main() -> int:
    """Returns 1 if a copy was neither read nor rejected, else 0."""
    parser = argparse.ArgumentParser(description="Broken checkpoints of every kind through their readers.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random, bad = Random(arguments.seed), 0
    for number, kind in enumerate(KINDS):
        count = arguments.count * (number + 1) // len(KINDS) - arguments.count * number // len(KINDS)
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as home:
            found = check(kind, count, random, Path(home))
        wrong = count - found["read"] - found["refused"]
        seconds = time.perf_counter() - began
        good = f"{found['read']} read, {found['refused']} refused"
        print(f"{kind:14} {count} copies: {good}, {wrong} wrong, {seconds:.0f} s", flush=True)
        bad += wrong
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
