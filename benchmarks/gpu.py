"""All measurements on a GPU in one command: bit-exactness, timings against bars, and training; `make bench-gpu`.

    python benchmarks/gpu.py --minutes 9 --out DIR     # on a GPU; resumes after the rows that DIR has
    python benchmarks/gpu.py --dry --out DIR           # without one: every section at tiny sizes, figures mean nothing

Each section runs in its own process, which is killed when its time is up. DIR/rows.jsonl has every row as it
comes, DIR/gpu.json all of them with machine, versions and verdicts, DIR/table.txt the table printed at the end.
This file imports only the standard library, so that the table is printed even if nothing else runs.
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
"""Seconds of each section out of nine minutes. The time that a section does not use goes to later ones, in
proportion."""
GRACE = 8.0
"""Seconds after a section's time during which its process may still end by itself: rows are not interrupted before."""
RESERVE = 6.0
"""Seconds kept for the table."""


def main() -> None:
    """Run the sections asked for; the table is printed however they end."""
    parser = argparse.ArgumentParser(description="Measure on a GPU, or try everything without one (--dry).")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--sections", default=",".join(WEIGHTS), help="separated by commas (default: all)")
    parser.add_argument("--exhaustive", action="store_true", help="2^32 patterns of every format and rounding")
    parser.add_argument("--dry", action="store_true", help="on the CPU, at tiny sizes; nothing is measured")
    parser.add_argument(
        "--twin-cpu", action="store_true", help="train the 10.8M model on this CPU, keep its losses, end"
    )
    arguments = parser.parse_args()
    sections = arguments.sections.split(",")
    if unknown := sorted(set(sections) - set(WEIGHTS)):
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(WEIGHTS)}")
    print(_libraries(), flush=True)
    if arguments.twin_cpu:
        raise SystemExit(subprocess.run([sys.executable, "-m", "on_gpu.twin"], env=environment()).returncode)
    if not arguments.dry and (lacking := _lacking()):
        parser.error(f"{lacking}: nothing can be measured. Take a Python with torch for CUDA and Triton, or try --dry")
    signal.signal(signal.SIGTERM, _interrupt)
    journal = Journal(arguments.out / "rows.jsonl")
    options = ["--lines", str(journal.path)] + ["--dry"] * arguments.dry + ["--exhaustive"] * arguments.exhaustive
    doctor = None if arguments.dry or "correctness" not in sections else _doctor(arguments.out / "doctor.json")
    try:
        measure(sections, options, journal, time.monotonic() + 60 * arguments.minutes - RESERVE)
    except KeyboardInterrupt:
        print("stopped; what was measured:", flush=True)
    if doctor is not None:
        journal.end("correctness", "doctor, without the GPU", _diagnosis(doctor, arguments.out / "doctor.json"))
    finish(journal, arguments.out, arguments.dry, sections)


def measure(
    sections: Sequence[str],
    options: Sequence[str],
    journal: Journal,
    ends: float,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Run each section in its share of the time that is left.

    If a process ends during a row (its GPU's context lost, or killed), another one continues with the row after it, as
    long as each has begun a new row. The last failure is a row of its own.
    """
    for number, section in enumerate(sections):
        rest = sum(WEIGHTS[name] for name in sections[number:])
        until = now() + max(ends - now() - GRACE, 0) * WEIGHTS[section] / rest
        print(f"== {section}, {until - now():.0f} s", flush=True)
        before = -1
        while before < (begun := len(journal.rows().keys() - {(section, PROCESS)})) and now() < until:
            before, (code, last_line) = (
                begun,
                _run(section, options, until - now(), journal.path.with_name(f"{section}.err")),
            )
            if not code:
                if (section, PROCESS) in journal.rows():  # of an earlier run
                    journal.end(section, PROCESS, {"result": "it ended by itself"})
                break
            failed = f"its process ended with exit code {code}" + (f": {last_line}" if last_line else "")
            print(f"{section}: {failed}", flush=True)
            if now() < until:
                journal.end(section, PROCESS, {"failed": failed})


def _run(section: str, options: Sequence[str], seconds: float, errors: Path) -> tuple[int, str]:
    """Run a section's process, killed with all its children if it exceeds its time: its exit code, and the last line of
    its stderr, all of which goes to the file `errors`."""
    words = [sys.executable, "-m", "on_gpu", section, "--seconds", str(seconds), *options]
    errors.parent.mkdir(parents=True, exist_ok=True)
    with errors.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(words, env=environment(), start_new_session=True, stderr=file)
        try:
            code = child.wait(seconds + GRACE)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            ended(child)
    return code, (errors.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""])[-1]


def ended(child: subprocess.Popen[str]) -> None:
    """Kill a process and all its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def environment() -> dict[str, str]:
    """The environment variables of a section's process, in which this repository's halfstep is imported first."""
    places = [BENCHMARKS, BENCHMARKS.parent / "src", os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(place) for place in places if str(place))}


def _doctor(report: Path) -> subprocess.Popen[str]:
    """Start `halfstep doctor` on the CPU's kernels beside the sections, on its own core: compiling them takes long, and
    would disturb timings on the GPU, where the correctness section tests the GPU's kernels in the same way."""
    report.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "halfstep", "doctor", "--json"]
    hidden = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    with report.open("w", encoding="utf-8") as file:
        return subprocess.Popen(words, env=hidden, stdout=file, text=True, start_new_session=True)


def _diagnosis(doctor: subprocess.Popen[str], report: Path) -> dict[str, object]:
    code = doctor.poll()
    ended(doctor)
    try:
        kernels = json.loads(report.read_text(encoding="utf-8"))["kernels"]
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
    """The versions of numpy and numba, or why numba does not import: with a numpy that numba refuses, halfstep's CPU
    kernels cannot be imported."""
    words = [
        "import numpy; print('numpy', numpy.__version__, end=', ')",
        "import numba; print('numba', numba.__version__)",
    ]
    completed = subprocess.run([sys.executable, "-c", "; ".join(words)], capture_output=True, text=True)
    last = completed.stderr.strip().splitlines()[-1:] if completed.returncode else []
    hint = " -> only machine, probes and products start without it: carry a numpy that it takes (docs/gpu_figures.md)"
    hint = hint if last else ""
    return completed.stdout.strip() + " ".join(last) + hint


def _lacking() -> str:
    """Why this Python cannot measure, in one line; empty if it can."""
    words = "import torch, triton; assert torch.cuda.is_available(), 'torch sees no CUDA device here'"
    completed = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    return (completed.stderr.strip().splitlines() or ["it ended without a word"])[-1] if completed.returncode else ""


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
