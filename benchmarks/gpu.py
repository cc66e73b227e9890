"""Everything that waits for a GPU, in one command: bits, bars, and training; `make bench-gpu`.

    python benchmarks/gpu.py --minutes 9 --out DIR     # on a GPU; a DIR that has rows goes on where they end
    python benchmarks/gpu.py --dry --out DIR           # without one: every section at tiny sizes, figures mean nothing

Each section runs in a process of its own, which is ended when its time is up. DIR/rows.jsonl has every row as it
comes, DIR/gpu.json all of them with machine, versions and verdicts, DIR/table.txt what is printed at the end.
This file imports the standard library alone, so that the table is printed whatever else does not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from on_gpu.journal import PROCESS, Journal
from on_gpu.table import summary


BENCHMARKS = Path(__file__).resolve().parent
WEIGHTS = {
    "machine": 10, "correctness": 170, "probes": 6, "casts": 60, "optimizers": 60, "products": 100, "training": 120,
}  # fmt: skip
"""Seconds of nine minutes. What a section leaves over goes to those after it, in proportion."""
GRACE = 8.0
"""Seconds after a section's time in which it may end by itself: a row is not stopped in its middle before."""
RESERVE = 6.0
"""Seconds for the table."""


def main() -> None:
    """Run what was asked for; the table is printed whatever ended it."""
    parser = argparse.ArgumentParser(description="Measure on a GPU, or try everything without one (--dry).")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--sections", default=",".join(WEIGHTS), help="separated by commas (default: all)")
    parser.add_argument("--exhaustive", action="store_true", help="2^32 patterns of every format and rounding")
    parser.add_argument("--dry", action="store_true", help="on the CPU, at tiny sizes; nothing is measured")
    parser.add_argument(
        "--twin-cpu", action="store_true", help="train the 10.8M model on this CPU, keep its losses, end"
    )
    asked = parser.parse_args()
    sections = asked.sections.split(",")
    if unknown := sorted(set(sections) - set(WEIGHTS)):
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(WEIGHTS)}")
    print(_libraries(), flush=True)
    if asked.twin_cpu:
        raise SystemExit(subprocess.run([sys.executable, "-m", "on_gpu.twin"], env=environment()).returncode)
    if not asked.dry and (lacking := _lacking()):
        parser.error(f"{lacking}: nothing can be measured. Take a Python with torch for CUDA and Triton, or try --dry")
    signal.signal(signal.SIGTERM, _interrupt)
    journal = Journal(asked.out / "rows.jsonl")
    options = ["--lines", str(journal.path)] + ["--dry"] * asked.dry + ["--exhaustive"] * asked.exhaustive
    doctor = None if asked.dry or "correctness" not in sections else _doctor(asked.out / "doctor.json")
    try:
        measure(sections, options, journal, time.monotonic() + 60 * asked.minutes - RESERVE)
    except KeyboardInterrupt:
        print("stopped; what was measured:", flush=True)
    if doctor is not None:
        journal.end("correctness", "doctor, without the GPU", _diagnosis(doctor, asked.out / "doctor.json"))
    finish(journal, asked.out, asked.dry, sections)


def measure(
    sections: Sequence[str],
    options: Sequence[str],
    journal: Journal,
    ends: float,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Run each section in its share of the time that is left.

    A process that ended in the middle of a row, its GPU's context lost or itself killed, is followed by another, which
    goes on with the row after that one: as long as each has begun one. How the last one failed is a row of its own.
    """
    for number, section in enumerate(sections):
        rest = sum(WEIGHTS[name] for name in sections[number:])
        until = now() + max(ends - now() - GRACE, 0) * WEIGHTS[section] / rest
        print(f"== {section}, {until - now():.0f} s", flush=True)
        before = -1
        while before < (begun := len(journal.rows().keys() - {(section, PROCESS)})) and now() < until:
            before, (code, said) = (
                begun,
                _run(section, options, until - now(), journal.path.with_name(f"{section}.err")),
            )
            if not code:
                if (section, PROCESS) in journal.rows():  # of an earlier run
                    journal.end(section, PROCESS, {"result": "it ended by itself"})
                break
            failed = f"its process ended with exit code {code}" + (f": {said}" if said else "")
            print(f"{section}: {failed}", flush=True)
            if now() < until:
                journal.end(section, PROCESS, {"failed": failed})


def _run(section: str, options: Sequence[str], seconds: float, told: Path) -> tuple[int, str]:
    """A section's process, ended with all that it started where it goes on for longer than it may: its exit code, and
    the last line of what it wrote to stderr, all of which goes to the file `told`."""
    words = [sys.executable, "-m", "on_gpu", section, "--seconds", str(seconds), *options]
    told.parent.mkdir(parents=True, exist_ok=True)
    with told.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(words, env=environment(), start_new_session=True, stderr=file)
        try:
            code = child.wait(seconds + GRACE)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            ended(child)
    return code, (told.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""])[-1]


def ended(child: subprocess.Popen[str]) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def environment() -> dict[str, str]:
    """The variables of a section's process: it finds this repository's halfstep before any other."""
    places = [BENCHMARKS, BENCHMARKS.parent / "src", os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(place) for place in places if str(place))}


def _doctor(told: Path) -> subprocess.Popen[str]:
    """`halfstep doctor` of the CPU's kernels, on a core of its own beside everything else: compiling them takes long,
    and on the GPU it would disturb what is timed there, where the section asks the same of the GPU's kernels."""
    told.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "halfstep", "doctor", "--json"]
    hidden = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    with told.open("w", encoding="utf-8") as file:
        return subprocess.Popen(words, env=hidden, stdout=file, text=True, start_new_session=True)


def _diagnosis(doctor: subprocess.Popen[str], told: Path) -> dict[str, object]:
    code = doctor.poll()
    ended(doctor)
    try:
        kernels = json.loads(told.read_text(encoding="utf-8"))["kernels"]
    except ValueError:
        return {"failed": "time was up before it ended" if code is None else f"exit code {code}, and no JSON"}
    wrong = [kernel for kernel in kernels if kernel["difference"] is not None]
    return {"result": f"{len(kernels) - len(wrong)} of {len(kernels)} kernel tests equal the reference", "wrong": wrong}


def finish(journal: Journal, out: Path, dry: bool, sections: Sequence[str]) -> None:
    """Write the JSON and the table, and print the table."""
    found = summary(journal.rows(), dry, sections)
    text = found.pop("text")
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (out / "table.txt").write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)


def _libraries() -> str:
    """numba beside numpy: a numba that refuses the numpy there stops halfstep's CPU kernels from being imported."""
    words = [
        "import numpy; print('numpy', numpy.__version__, end=', ')",
        "import numba; print('numba', numba.__version__)",
    ]
    told = subprocess.run([sys.executable, "-c", "; ".join(words)], capture_output=True, text=True)
    last = told.stderr.strip().splitlines()[-1:] if told.returncode else []
    hint = " -> only machine, probes and products start without it: carry a numpy that it takes (docs/gpu_figures.md)"
    hint = hint if last else ""
    return told.stdout.strip() + " ".join(last) + hint


def _lacking() -> str:
    """What keeps this Python from measuring, in a line; empty where nothing does."""
    words = "import torch, triton; assert torch.cuda.is_available(), 'torch sees no CUDA device here'"
    told = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    return (told.stderr.strip().splitlines() or ["it ended without a word"])[-1] if told.returncode else ""


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
