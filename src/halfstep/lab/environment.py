"""The machine and software of a run, on which its timings and last bits depend."""

import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import halfstep


def environment() -> dict[str, Any]:
    """Versions, processor, threads, accelerator."""
    return {
        "halfstep": halfstep.__version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numba": version("numba"),
        "numpy": version("numpy"),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
