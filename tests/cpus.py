"""Run processor-dependent tests as if on other processors: `make test-cpus`.

A cell is a setting of a library that computes (torch, oneDNN, MKL, numba) or of the threads. In each cell the tests
marked `cpu` run (including those with the fixture `products`), and `halfstep doctor` compares every kernel with the
reference. Settings that this processor does not support are skipped by name. Arguments are passed to pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


ROOT = Path(__file__).parent.parent
AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
NUMBA_AVX2 = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": ""}  # without the second, numba adds this machine's
SEEN = """
import os, numba, torch
from numba.core.registry import cpu_target
torch.set_num_threads(THREADS)
torch.nn.functional.conv2d(torch.ones(8, 3, 64, 64), torch.ones(16, 3, 3, 3))  # oneDNN says what it has when used
name = cpu_target.target_context.codegen().magic_tuple()[1]
print(f"seen torch {torch.backends.cpu.get_cpu_capability()}, numba {name}, threads {torch.get_num_threads()}", end="")
print(f" and {min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)}")
"""


@dataclass(frozen=True)
class Cell:
    """A setting. `needs`: flags of /proc/cpuinfo; `best`: a machine with these flags uses this setting by default."""

    settings: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    threads: int = 1
    x86: bool = True
    best: bool = False

    @property
    def name(self) -> str:
        threads = [f"{self.threads} threads"] if self.threads > 1 else []
        return ", ".join([f"{key}={value}" for key, value in self.settings.items()] + threads) or "this machine"


def levels(variable: str, **needs: tuple[str, ...]) -> list[Cell]:
    """The levels of one setting, lowest first. A machine's highest level is its default, which the first cell runs."""
    return [Cell({variable: level}, flags, best=bool(flags)) for level, flags in needs.items()]


CELLS = [
    Cell(x86=False),
    *levels("ATEN_CPU_CAPABILITY", default=(), avx2=("avx2", "fma"), avx512=(*AVX512, "fma")),
    *levels(
        "ONEDNN_MAX_CPU_ISA",
        SSE41=(),
        AVX2=("avx2",),
        AVX512_CORE=AVX512,
        AVX512_CORE_BF16=(*AVX512, "avx512_bf16"),
        AVX512_CORE_FP16=(*AVX512, "avx512_bf16", "avx512_fp16"),
        AVX512_CORE_AMX=(*AVX512, "avx512_bf16", "avx512_fp16", "amx_bf16"),
    ),
    Cell({"MKL_CBWR": "COMPATIBLE"}),
    Cell({"MKL_CBWR": "AVX2"}, ("avx2",)),
    Cell(NUMBA_AVX2, ("avx2", "fma", "bmi2")),
    Cell({**NUMBA_AVX2, "NUMBA_CPU_NAME": "x86-64-v4"}, AVX512),
    Cell(threads=2, x86=False),
    Cell(
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2", **NUMBA_AVX2},
        ("avx2", "fma", "bmi2"),
        threads=2,
    ),
]


def flags_of(cpuinfo: str) -> frozenset[str] | None:
    """The flags of an x86 processor, or None on others."""
    found = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(found[1].split()) if found else None


def why_not(cell: Cell, flags: frozenset[str] | None) -> str | None:
    """Why a cell is skipped on a machine with these flags, or None."""
    if flags is None:
        return "skipped: no x86 processor" if cell.x86 else None
    missing = [flag for flag in cell.needs if flag not in flags]
    if missing:
        return f"skipped: this processor has no {', '.join(missing)}"
    variable = next(iter(cell.settings), None)
    rivals = [c for c in CELLS if c.best and next(iter(c.settings)) == variable and flags.issuperset(c.needs)]
    return "as the first: what this machine does unasked" if cell.best and cell is rivals[-1] else None


def run(cell: Cell, options: list[str]) -> tuple[bool, str]:
    """Whether all tests of a cell pass, and a line about them, followed by lines about failures."""
    began = time.monotonic()
    threads = {"OMP_NUM_THREADS": str(cell.threads), "NUMBA_NUM_THREADS": str(max(cell.threads, os.cpu_count() or 1))}
    environment = {**os.environ, **threads, **cell.settings}
    words = ("pytest.mark.cpu", '"products"', ", products)")
    marked = sorted(str(p) for p in ROOT.glob("tests/**/test_*.py") if any(word in p.read_text() for word in words))
    pytest = ["-m", "pytest", "-m", "cpu and not slow", "-p", "no:cacheprovider", f"--threads={cell.threads}"]
    seen = _python(["-c", SEEN.replace("THREADS", str(cell.threads))], {**environment, "ONEDNN_VERBOSE": "1"})
    kernels = _python(["-m", "halfstep", "doctor"], environment)
    tests = _python([*pytest, *options, *marked], environment)
    isa = re.search(r"cpu,isa:(.*)", seen.stdout)
    torch = re.search(r"^seen (.*)$", seen.stdout, re.MULTILINE)
    has = f"{torch[1] if torch else seen.stderr}, oneDNN {isa[1] if isa else 'unused'}"
    equal = re.search(r"\d+ of \d+ kernel tests", kernels.stdout)
    report = [tests.stdout.strip().rpartition("\n")[2], equal[0] if equal else "no kernel tested", has]
    good = kernels.returncode == tests.returncode == 0
    lines = [] if kernels.returncode == 0 else kernels.stderr.strip().splitlines()[-12:]
    lines += [line for line in tests.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    line = f"{'ok' if good else 'FAILED'}: {'; '.join(report)}; {time.monotonic() - began:.0f} s"
    return good, "\n    ".join([line, *lines])


def _python(arguments: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def main() -> None:
    flags, failed = flags_of(Path("/proc/cpuinfo").read_text()), 0
    for cell in CELLS:
        print(f"{cell.name}: ", end="", flush=True)
        reason = why_not(cell, flags)
        good, line = (True, reason) if reason else run(cell, sys.argv[1:])
        print(line, flush=True)
        failed += not good
    sys.exit(f"{failed} of {len(CELLS)} cells failed" if failed else 0)


if __name__ == "__main__":
    main()
