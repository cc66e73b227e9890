"""The cases of every Triton kernel on a GPU, and nothing else: what compute-sanitizer looks at."""

from __future__ import annotations

import torch

from halfstep.kernels import selftest_gpu


def main() -> None:
    """Exit code 1: a case differs from the reference."""
    found = list(selftest_gpu.outcomes(torch.device("cuda")))
    torch.cuda.synchronize()
    print(f"{len(found)} tests, {sum(not outcome.passed for outcome in found)} wrong")
    raise SystemExit(not all(outcome.passed for outcome in found))


if __name__ == "__main__":
    main()
