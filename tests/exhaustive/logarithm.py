"""The largest errors of log2 and exp2 of `quant.logarithm` over all inputs, in ulps, against numpy's in float64.

python tests/exhaustive/logarithm.py [--every N]
"""

import argparse
import json

import numpy as np
import torch

from halfstep.quant.logarithm import exp2, log2


CHUNK = 1 << 23


def ulps(found, exact):
    """The largest error of float32 values against exact ones, in ulps of the exact values."""
    unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    distance = np.abs(found.double().numpy() - exact)
    return float(np.where(exact == 0, np.where(distance == 0, 0, np.inf), distance / unit).max())


def chunks(first, last, every):
    """Positive float32 values whose bits are in [first, last), every `every`-th, in chunks."""
    for start in range(first, last, CHUNK * every):
        yield torch.arange(start, min(start + CHUNK * every, last), every, dtype=torch.int32).view(torch.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    every = parser.parse_args().every
    top = int(torch.tensor(126.0).view(torch.int32)) + 1
    worst = {"log2": 0.0, "exp2": 0.0}
    for x in chunks(1 << 23, 255 << 23, every):
        worst["log2"] = max(worst["log2"], ulps(log2(x), np.log2(x.double().numpy())))
    for x in chunks(0, top, every):
        for signed in (x, -x):
            worst["exp2"] = max(worst["exp2"], ulps(exp2(signed), np.exp2(signed.double().numpy())))
    print(json.dumps(worst))


if __name__ == "__main__":
    main()
