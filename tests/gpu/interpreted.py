"""Run the cases of every Triton kernel in Triton's interpreter: a line of JSON for each kernel and format.

    TRITON_INTERPRET=1 PYTHONPATH=src:.triton/3.7.1 python tests/gpu/interpreted.py [--core]

Run in a process of its own, since Triton reads the variable when a kernel is defined.
"""

import dataclasses
import json
import sys
from functools import partial
from itertools import chain

import fuzzed
import fuzzed_moments
import numpy as np
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from halfstep.kernels import selftest_gpu
from halfstep.kernels.gpu import optimizer
from halfstep.kernels.gpu.launch import functions
from halfstep.kernels.selftest import outcome
from halfstep.optim import selftest_gpu as optim_selftest_gpu


def first(cases):
    """The cases that compare the first 4,000 numbers."""
    compared = 0
    while compared < 4000 and (case := next(cases, None)) is not None:
        compared += case[0].numel()
        yield case


if __name__ == "__main__":
    np.seterr(all="ignore")  # the interpreter computes in numpy, which says so where a number is not finite
    torch.set_num_threads(1)
    assert isinstance(functions("cast").cast, InterpretedFunction), "TRITON_INTERPRET=1 is not set"
    optimizer.EACH, optimizer.MANY = 3, 4  # programs with all of their blocks, and one with fewer
    core, device = "--core" in sys.argv, torch.device("cpu")
    if core:
        optim_selftest_gpu.GRADIENTS = {"hard": optim_selftest_gpu.GRADIENTS["hard"]}
    seen: set[str] = set()
    tests = []
    for kernel, format, test in chain(selftest_gpu.tests(), optim_selftest_gpu.tests()):
        if not core or kernel not in seen:
            seen.add(kernel)
            tests.append((kernel, format, partial(test, device=device)))
    if core:  # the others are in the slow tests
        tests = [(kernel, format, lambda name, run=run: first(run(name))) for kernel, format, run in tests]
    if not core:
        tests += [("fuzzed casts", name, fuzzed.cases) for name in fuzzed.names()]
        tests += [(*test[:2], lambda _, run=test[2]: run()) for test in fuzzed_moments.tests()]
    for kernel, format, test in tests:
        found = outcome(kernel, format, test)
        print(json.dumps({"triton": triton.__version__} | dataclasses.asdict(found)), flush=True)
