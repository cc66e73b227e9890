"""Checks in Triton's interpreter that it does not make itself: addresses outside of every tensor, and programs of a
launch that write where another one reads or writes, which is a race on a GPU. A line of JSON for each kernel.

    TRITON_INTERPRET=1 PYTHONPATH=src:.triton/3.7.1 python tests/gpu/watched.py [KERNEL ...]

Without KERNEL arguments each kernel is tested on the first of its formats. Atomics of several programs may overlap.
"""

import gc
import json
import sys
import warnings

import numpy as np
import torch
import triton
from triton.runtime import interpreter

from halfstep.kernels import selftest
from halfstep.optim import selftest as optim


KINDS = ("store", "load", "atomic")
TABLES = {"prepare", "update", "advance", "square"}
"""Functions that get tensors as addresses in a table."""


class Watch:
    """The bytes that the programs of a launch access."""

    def __init__(self):
        self.faults = set()
        self._programs, self._spans, self._kernel = [], np.zeros((1, 2), np.uint64), ""
        builder = interpreter.interpreter_builder
        for name, kind, place in (
            ("create_masked_load", "load", 0), ("create_masked_store", "store", 0), ("create_atomic_rmw", "atomic", 1),
        ):  # fmt: skip
            setattr(builder, name, self._watching(getattr(builder, name), kind, place))
        begin = builder.set_grid_idx
        builder.set_grid_idx = lambda *place: (self._programs.append({kind: [] for kind in KINDS}), begin(*place))[1]
        call = interpreter.GridExecutor.__call__
        interpreter.GridExecutor.__call__ = lambda executor, *given, **named: self._launch(call, executor, given, named)

    def _watching(self, method, kind, place):
        def watched(*given):
            pointers, mask = given[place], given[{"load": 1, "store": 2, "atomic": 3}[kind]]
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            addresses = np.asarray(pointers.data, np.uint64).ravel()
            if mask is not None:
                addresses = addresses[np.broadcast_to(np.asarray(mask.data, bool), pointers.data.shape).ravel()]
            place_of = np.searchsorted(self._spans[:, 0], addresses, side="right") - 1
            ends = self._spans[np.maximum(place_of, 0), 1]
            if ((place_of < 0) | (addresses + np.uint64(size) > ends)).any():
                self.faults.add(f"{self._kernel}: a {kind} outside of every tensor")
            self._programs[-1][kind].append((addresses[:, None] + np.arange(size, dtype=np.uint64)).ravel())
            return method(*given)

        return watched

    def _launch(self, call, executor, given, named):
        self._kernel, self._programs = executor.fn.__name__, []
        everywhere = self._kernel in TABLES or dict(zip(executor.arg_names, given, strict=False)).get("held")
        owned = gc.get_objects() if everywhere else (*given, *named.values())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of objects that are only inspected
            storages = [t.untyped_storage() for t in owned if type(t) in (torch.Tensor, torch.nn.Parameter)]
        spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()})
        self._spans = np.array(spans or [(0, 0)], np.uint64)
        result = call(executor, *given, **named)
        self._compare()
        return result

    def _compare(self):
        """Record stores to bytes that another program accesses."""
        touched = [{k: np.unique(np.concatenate(v)) if v else [] for k, v in one.items()} for one in self._programs]
        stored = np.concatenate([one["store"] for one in touched]) if touched else np.zeros(0)
        owner = np.concatenate([np.full(len(one["store"]), n) for n, one in enumerate(touched)]) if touched else stored
        order = np.argsort(stored, kind="stable")
        stored, owner = stored[order], owner[order]
        if (stored[1:] == stored[:-1]).any():
            self.faults.add(f"{self._kernel}: two programs store to one address")
        for number, one in enumerate(touched):
            for kind in ("load", "atomic"):
                if len(one[kind]) and len(stored):
                    at = np.minimum(np.searchsorted(stored, one[kind]), len(stored) - 1)
                    if ((stored[at] == one[kind]) & (owner[at] != number)).any():
                        self.faults.add(f"{self._kernel}: a program's {kind} meets what another one stores")


if __name__ == "__main__":
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    watch, seen = Watch(), set()
    for test in (*selftest.GPU, *optim.GPU):
        if test.kernel in sys.argv[1:] if sys.argv[1:] else test.kernel not in seen:
            seen.add(test.kernel)
            watch.faults.clear()
            compared = sum(case.expected.numel() for case in test.cases(torch.device("cpu")))
            told = {"triton": triton.__version__, "kernel": test.kernel, "format": test.format, "compared": compared}
            print(json.dumps(told | {"faults": sorted(watch.faults)}), flush=True)
