"""The speed of `halfstep inspect` on a checkpoint of 4 GB in the page cache, and the memory it needs.

Half of the checkpoint is float32, half bfloat16, in shards of half a gigabyte. One thread: the bars are for
bytes per second of CPU time, that is per core, which other load on the machine disturbs less than wall-clock time.
`--small` instead measures the CPU time of 120,000 tensors of 64 to 256 values.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

import halfstep
from halfstep.inspection import Checkpoint, open_checkpoint
from halfstep.lab.environment import environment
from harness import keep


SMALL, SMALL_SHAPES, SMALL_BAR = 120_000, ((64,), (16, 16), (4, 64)), 15.0  # CPU seconds
SHARD = 1 << 29
WIDTH = 4096
MEMORY = """
import sys, threading, time, halfstep
from pathlib import Path
halfstep.inspect(sys.argv[1], casts=["all"])  # compiles
def anonymous():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("RssAnon"))
    return int(line.split()[1]) / 1024
base, peak, done = anonymous(), 0.0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.005)
thread = threading.Thread(target=watch)
thread.start()
halfstep.inspect(sys.argv[2], casts=sys.argv[3:])
done = True
thread.join()
print(peak - base)
"""


def write_checkpoint(folder: Path, shards: int) -> None:
    """Write a Hugging Face folder of matrices of N(0, 0.02), with half of the shards in float32, the others in
    bfloat16."""
    base = torch.randn(SHARD // 4 // WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) * 0.02
    weights = {}
    for shard in range(shards):
        dtype = torch.float32 if shard < shards // 2 else torch.bfloat16
        parts = (
            [base.roll(shard, 1)] if dtype == torch.float32 else [base.roll(shard + k, 1).bfloat16() for k in (0, 1)]
        )
        rows = torch.cat(parts).split(len(base) // 4 if dtype == torch.float32 else len(base) // 2)
        tensors = {f"model.layers.{shard}.mlp.{i}.weight": part.contiguous() for i, part in enumerate(rows)}
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        weights |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))


def numpy_or(checkpoint: Checkpoint) -> int:
    """The bitwise OR of all words: the least work that reads every bit."""
    found = 0
    for tensor in checkpoint.tensors:
        for chunk in tensor.chunks(1 << 24):
            found |= int(np.bitwise_or.reduce(chunk.view(np.uint64)))
    return found


def naive(file: Path) -> list[Any]:
    """A straightforward inspection in torch (load, convert, compare) with fewer figures than halfstep's."""
    found = []
    for tensor in load_file(file).values():
        x = tensor.float()
        finite = x.isfinite()
        found.append(
            (
                finite.all(), (x == 0).sum(), x.abs().amax(), (x.bfloat16().float() == x).float().mean(),
                (x.half().float() == x).float().mean(), torch.frexp(x)[1].unique(return_counts=True),
            )
        )  # fmt: skip
    return found


def measure(runs: dict[str, tuple[Callable[[], Any], int]], rounds: int) -> dict[str, dict[str, float]]:
    """Median gigabytes per second of wall-clock and of CPU time; every round runs all, in shuffled order."""
    clock: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.Random(0).sample(list(runs), len(runs)):
            started, used = time.perf_counter(), time.process_time()
            runs[name][0]()
            clock[name].append(time.perf_counter() - started)
            cpu[name].append(time.process_time() - used)
    return {
        name: {
            "gb": size / 1e9,
            "gb_per_second": size / 1e9 / statistics.median(clock[name]),
            "gb_per_cpu_second": size / 1e9 / statistics.median(cpu[name]),
        }
        for name, (_, size) in runs.items()
    }


def memory(small: Path, path: Path, casts: list[str]) -> float:
    """The peak anonymous memory of an inspection, in MB above that after importing and compiling."""
    command = [sys.executable, "-c", MEMORY, str(small), str(path), *casts]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def small(rounds: int) -> dict[str, float]:
    """The fewest CPU seconds of inspecting SMALL tensors, for each dtype."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        generator, name = torch.Generator().manual_seed(0), str(dtype).removeprefix("torch.")
        shapes = [SMALL_SHAPES[i % len(SMALL_SHAPES)] for i in range(SMALL)]
        tensors = {
            f"layers.{i}.mlp.w{i % 3}.weight": (torch.randn(shape, generator=generator) * 0.02).to(dtype)
            for i, shape in enumerate(shapes)
        }
        with tempfile.TemporaryDirectory(prefix="halfstep-inspect-") as folder:
            path, warm = Path(folder) / "model.safetensors", Path(folder) / "warm.safetensors"
            save_file(tensors, path)
            save_file(dict(list(tensors.items())[:30]), warm)
            del tensors
            halfstep.inspect(warm)
            times = []
            for _ in range(rounds):
                used = time.process_time()
                halfstep.inspect(path)
                times.append(time.process_time() - used)
        found[name] = min(times)
    return found


def keep_small(rounds: int, kept: bool) -> None:
    """Measure small tensors, print, and if `kept` write the results."""
    found = small(rounds)
    for name, seconds in found.items():
        print(f"{SMALL} small tensors of {name}: {seconds:.1f} s of CPU, at most {SMALL_BAR:g}")
    if kept:
        question = f"CPU seconds of inspecting {SMALL} tensors of shapes {SMALL_SHAPES}, the fewest of {rounds} rounds"
        data = {"tensors": SMALL, "at_most": SMALL_BAR, "cpu_seconds": found}
        keep("inspect_small", {"question": question, "machine": environment(), **data})


def bars(found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Rows of each bar: what it is about, the measured value, the least allowed, and whether it is met."""
    speed = {name: row["gb_per_cpu_second"] for name, row in found.items()}
    rows = [
        ("all statistics, float32: GB a second and core", speed["statistics, float32"], 1.0),
        ("all statistics, bfloat16: GB a second and core", speed["statistics, bfloat16"], 1.0),
        ("what-if table, float32: GB a second and core", speed["what-if, float32"], 0.3),
        ("what-if table, bfloat16: GB a second and core", speed["what-if, bfloat16"], 0.3),
        ("--quick over numpy's OR, where all must be read", speed["quick, cast weights"] / speed["numpy OR"], 0.6),
        (
            "all statistics over the naive way in torch, float32",
            speed["statistics, float32"] / speed["naive torch"],
            None,
        ),
    ]
    return [
        {"bar": bar, "value": value, "at_least": least, "met": None if least is None else value >= least}
        for bar, value, least in rows
    ]


def main() -> None:
    """Measure, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=8, help="of half a gigabyte each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="write results/inspect.json, or inspect_small.json")
    parser.add_argument("--small", action="store_true", help="120,000 small tensors instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.small:
        keep_small(options.rounds, options.keep)
        return
    folder = Path(tempfile.mkdtemp(prefix="halfstep-inspect-"))
    try:
        write_checkpoint(folder, options.shards)
        shards = sorted(folder.glob("*.safetensors"))
        wide, narrow = shards[0], shards[-1]
        cast = folder / "cast" / "model.safetensors"  # float32 with bf16 values: a quick inspection must read all
        cast.parent.mkdir()
        save_file({name: x.bfloat16().float() for name, x in load_file(wide).items()}, cast)
        size = sum(tensor.nbytes for tensor in open_checkpoint(folder).tensors)
        for dtype in (torch.float32, torch.bfloat16):  # compiles what is not compiled yet
            save_file({"w": torch.randn(512, 512).to(dtype)}, folder / f"{dtype}.small")
            halfstep.inspect(folder / f"{dtype}.small", casts=["all"])
        found = measure(
            {
                "statistics": (lambda: halfstep.inspect(folder), size),
                "statistics, float32": (lambda: halfstep.inspect(wide), SHARD),
                "statistics, bfloat16": (lambda: halfstep.inspect(narrow), SHARD),
                "what-if, float32": (lambda: halfstep.inspect(wide, casts=["all"]), SHARD),
                "what-if, bfloat16": (lambda: halfstep.inspect(narrow, casts=["all"]), SHARD),
                "quick": (lambda: halfstep.inspect(folder, quick=True), size),
                "quick, cast weights": (lambda: halfstep.inspect(cast, quick=True), SHARD),
                "numpy OR": (lambda: numpy_or(open_checkpoint(cast)), SHARD),
                "naive torch": (lambda: naive(wide), SHARD),
            },
            options.rounds,
        )
        small = folder / "torch.bfloat16.small"
        anonymous = {"statistics, 4 GB": memory(small, folder, []), "what-if, 0.5 GB": memory(small, wide, ["all"])}
    finally:
        shutil.rmtree(folder)
    rows = bars(found)
    table = Table("run", "GB", "GB/s", "GB/s a core", box=None)
    for name, row in found.items():
        table.add_row(name, f"{row['gb']:.2f}", f"{row['gb_per_second']:.2f}", f"{row['gb_per_cpu_second']:.2f}")
    console = Console(width=120)
    console.print(table)
    for row in rows:
        bar = "" if row["at_least"] is None else f", at least {row['at_least']}: {'met' if row['met'] else 'MISSED'}"
        console.print(f"{row['bar']}: {row['value']:.2f}{bar}")
    console.print(f"anonymous memory above import, MB: {anonymous}")
    if options.keep:
        question = "how fast and in how much memory a checkpoint is inspected"
        data = {
            "machine": environment(),
            "rounds": options.rounds,
            "runs": found,
            "bars": rows,
            "rss_anon_mb": anonymous,
        }
        keep("inspect", {"question": question, **data})


if __name__ == "__main__":
    main()
