"""Run models on "cuda" without a GPU, as FakeTensors, recording every host synchronisation."""

import contextlib
import ctypes
import traceback
from collections import defaultdict
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


_CUDA, _META = 1, 14  # c10::DeviceType


@contextlib.contextmanager
def fake_cuda():
    """FakeTensorMode in which "cuda" devices exist and autocast is available. Without a GPU, the device guard is the
    meta device's, which does nothing."""
    autocast = mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False)
    bf16 = mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True)
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 32).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[_CUDA]
    guards[_CUDA] = before if torch.cuda.is_available() else guards[_META]
    try:
        with FakeTensorMode(), autocast, bf16:
            yield
    finally:
        guards[_CUDA] = before


class Reads(TorchDispatchMode):
    """A mode that records reads of "cuda" tensors' values and copies between device and host that synchronise. A value
    that is read is 0 or False."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket._qualified_op_name
        if name in ("aten::_local_scalar_dense", "aten::is_nonzero"):
            if args[0].is_cuda:
                self._note(name)
            return False if args[0].dtype == torch.bool else 0
        if name in ("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal"):
            self._note(name)
        goes = torch.device(kwargs.get("device") or args[0].device).type if name == "aten::_to_copy" else None
        if goes is not None and goes != args[0].device.type and not kwargs.get("non_blocking"):
            self._note(name)
        if (
            name == "aten::copy_"
            and args[0].device.type != args[1].device.type
            and True not in (*args[2:], *kwargs.values())
        ):
            self._note(name)
        return func(*args, **kwargs)

    def _note(self, name):
        """Record the operator, with the halfstep function that called it."""
        ours = [frame for frame in traceback.extract_stack() if "/src/halfstep/" in frame.filename]
        where = f"{Path(ours[-1].filename).name} {ours[-1].name}" if ours else "outside"
        self.found.add(f"{where}: {name}")


def backward(loss):
    """`loss.backward()`, node by node: torch's engine needs streams of a real GPU."""
    held = defaultdict(dict)
    held[loss.grad_fn][0] = torch.ones_like(loss)
    for node in _in_order(loss.grad_fn):
        given = held.pop(node, {})
        if not given:
            continue
        if hasattr(node, "variable"):
            _accumulate(node.variable, given[0])
            continue
        grads = []
        for place, like in enumerate(node._input_metadata):
            grad = given.get(place)
            if grad is None:
                grad = torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device)
            grads.append(grad.sum_to_size(tuple(like.shape)).to(like.dtype))
        with torch.no_grad():
            found = node.apply(*grads) if hasattr(node, "_forward_cls") else node(*grads)
        found = found if isinstance(found, tuple) else (found,)
        for (after, place), grad in zip(node.next_functions, found, strict=False):  # the rest: non-tensor arguments
            if after is not None and grad is not None:
                others = held[after]
                others[place] = others[place] + grad if place in others else grad


def _in_order(root):
    """Every node of the graph in topological order, each before the nodes it passes gradients to."""
    order, seen, path = [], {root}, [(root, iter(root.next_functions))]
    while path:
        node, rest = path[-1]
        for after, _ in rest:
            if after is not None and after not in seen:
                seen.add(after)
                path.append((after, iter(after.next_functions)))
                break
        else:
            order.append(node)
            path.pop()
    return order[::-1]


@torch.no_grad()
def _accumulate(parameter, grad):
    grad = grad.sum_to_size(tuple(parameter.shape)).to(parameter.grad_dtype or grad.dtype)
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(grad)
        grad = grad if changed is None else changed
    parameter.grad = grad.detach() if parameter.grad is None else parameter.grad + grad
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)
