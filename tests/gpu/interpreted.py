"""Run the cases of every Triton kernel in Triton's interpreter: a line of JSON for each kernel and format.

    TRITON_INTERPRET=1 PYTHONPATH=src:.triton/3.7.1 python tests/gpu/interpreted.py [--core]

Run it in its own process, since Triton reads the variable when a kernel is defined.
"""

import dataclasses
import json
import sys

import fuzzed
import fuzzed_moments
import numpy as np
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from halfstep.kernels import selftest
from halfstep.kernels.gpu import functions, optimizer
from halfstep.kernels.selftest.case import KernelTest, outcome
from halfstep.optim import selftest as optim


EASY = [("ordinary",), ("wide",)]
"""Gradients that the `hard` ones include."""


class Core(KernelTest):
    """Only the first cases, up to 4,000 compared numbers."""

    def cases(self, device):
        compared, cases = 0, super().cases(device)
        while compared < 4000 and (case := next(cases, None)) is not None:
            compared += case.expected.numel()
            yield case


if __name__ == "__main__":
    np.seterr(all="ignore")  # the interpreter computes in numpy, which warns of nonfinite numbers
    torch.set_num_threads(1)
    assert isinstance(functions("elementwise").cast, InterpretedFunction), "TRITON_INTERPRET=1 is not set"
    optimizer.EACH, optimizer.MANY = 3, 4  # programs with all of their blocks, and one with fewer
    tests = [*selftest.GPU, *optim.GPU]
    if "--core" in sys.argv:  # the others are in the slow tests
        first = {test.kernel: Core(*test) for test in tests[::-1]}.values()
        tests = [test._replace(points=[one for one in test.points if one not in EASY]) for test in first][::-1]
    else:
        tests += [*fuzzed.tests(), *fuzzed_moments.tests()]
    for test in tests:
        found = outcome(test)
        print(json.dumps({"triton": triton.__version__} | dataclasses.asdict(found)), flush=True)
