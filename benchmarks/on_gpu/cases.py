"""Run a share of the Triton kernels' tests on a device: one line of JSON for each kernel and format.

    python -m on_gpu.cases cuda NUMBER OF

Compiling takes most of the time, and a GPU's memory fits many processes: `correctness` starts one per core.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from halfstep.kernels import selftest
from halfstep.kernels.selftest.case import outcome
from halfstep.optim import selftest as optim


TESTS = (*selftest.GPU, *optim.GPU)


def main() -> None:
    """Run every OFth test from NUMBER on. Exit code 1 if one differs from the reference."""
    device, passed = torch.device(sys.argv[1]), True
    for test in TESTS[int(sys.argv[2]) :: int(sys.argv[3])]:
        found = outcome(test, device)
        passed &= found.passed
        print(json.dumps(asdict(found)), flush=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    raise SystemExit(not passed)


if __name__ == "__main__":
    main()
