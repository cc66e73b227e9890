"""Linear layers whose operands Triton's kernels round, in its interpreter, compared with layers whose operands the
CPU's kernels round: a line of JSON for each recipe.

    TRITON_INTERPRET=1 PYTHONPATH=src:.triton/3.7.1 python tests/gpu/native_layers.py [RECIPE ...]

Run it in its own process, since Triton reads the variable when a kernel is defined. Without tensor cores, their matmul
is computed in float64 from the codes and scales passed to them, and rounded once.
"""

import json
import sys
from importlib import import_module

import numpy as np
import torch
import torch.nn.functional as F
import triton

from halfstep import ops
from halfstep.kernels import scaled_mm
from halfstep.kernels.gpu import blocks, is_dense, layouts
from halfstep.kernels.gpu.amax import run as largest_of
from halfstep.ops import native, operand
from halfstep.ops.function import LastInput
from halfstep.ops.part import KEY
from halfstep.quant.scaling import StatefulScaling
from halfstep.recipe import get_recipe


CASES = {
    "fp8-current": (48, 80, 64), "fp8-delayed": (48, 80, 64), "fp8-rowwise": (48, 80, 64), "fp8-block": (128, 256, 384),
    "mxfp8": (160, 96, 128), "nvfp4": (160, 96, 128),
}  # fmt: skip
"""(rows, in, out) of the layers."""
TILES = {F.ScalingType.BlockWise1x32: 32, F.ScalingType.BlockWise1x16: 16}


def tensor_core_matmul(a, b, scale_a, kind_a, scale_b, kind_b, *_, bias=None, output_dtype=torch.bfloat16, **__):
    """The result of tensor cores, rounded once."""
    kinds, sides = F.ScalingType, []
    scale_b = scale_b.t() if kind_b == kinds.RowWise else scale_b
    for codes, scale, kind in ((a, scale_a, kind_a), (b.t(), scale_b, kind_b)):
        whole = torch.ones(())
        if isinstance(kind, list):  # two FP4 numbers in a byte, and two levels of scales
            (kind, _), (scale, whole) = kind, scale
            pairs = codes.view(torch.uint8)
            codes = ops.decode(torch.stack((pairs & 15, pairs >> 4), -1).flatten(1), "e2m1fn")
        (rows, shared), scale = codes.shape, scale.float().double()
        if kind == kinds.BlockWise128x128:  # transposed, and padded
            scale = scale.t()[: rows // 128, : shared // 128]
        if kind in TILES:  # in blocks of 128 x 4, filled up
            across = shared // TILES[kind]
            down, filled = -(-rows // 128), -(-across // 4)
            parts = scale.view(down, filled, 32, 4, 4).permute(0, 3, 2, 1, 4)
            scale = parts.reshape(128 * down, 4 * filled)[:rows, :across]
        for dim in range(scale.dim()):
            scale = scale.repeat_interleave(codes.shape[dim] // scale.shape[dim], dim)
        sides.append(codes.double() * scale * whole.double())
    made = sides[0] @ sides[1].t()
    return (made if bias is None else made + bias.double()).to(output_dtype)


def layer_results(name, seed, steps=2, cached=False):
    """Outputs, gradients and scaling states of two steps of two micro-batches. `cached`: the weight is rounded once per
    step."""
    spec = next(rule.linear for rule in get_recipe(name).rules if rule.linear.rounds)
    spec.known.clear()
    torch.manual_seed(seed)
    rows, fan_in, fan_out = CASES[name]
    states = {key: q.stateful.init() for key, q in spec.states.items()}
    states |= {KEY: torch.tensor([seed, 0])} if spec.draws else {}
    left = []
    for step in range(steps):
        x, w, b = torch.randn(rows, fan_in).bfloat16(), torch.randn(fan_out, fan_in), torch.randn(fan_out)
        x, w, b = ((t * 3.0**step).requires_grad_() for t in (x, w, b))
        more = torch.randn(2 * rows, fan_in).bfloat16().requires_grad_()
        weights = [w, w]
        if cached:
            weights = [ops.rounded_weight(w, spec, torch.bfloat16, states, True)] * 2
        for batch, weight in zip((x, more), weights, strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                y = ops.linear(batch, weight, b, spec, states, record=True)
            y.backward(torch.randn(len(batch), fan_out).bfloat16())
        left += [y.detach(), x.grad, more.grad, w.grad, b.grad, *(state.clone() for state in states.values())]
        for key, quantizer in spec.states.items():
            quantizer.stateful.advance(states[key], quantizer.format)
    return left


def sibling_results(name, seed, last):
    """Outputs and gradients of two layers of one input, the second with twice as many outputs."""
    spec = next(rule.linear for rule in get_recipe(name).rules if rule.linear.rounds)
    spec.known.clear()
    torch.manual_seed(seed)
    rows, fan_in, fan_out = CASES[name]
    x = torch.randn(rows, fan_in).bfloat16().requires_grad_()
    weights = [torch.randn(size, fan_in).requires_grad_() for size in (fan_out, 2 * fan_out)]
    states = {key: q.stateful.init() for key, q in spec.states.items()}
    states |= {KEY: torch.tensor([seed, 0])} if spec.draws else {}
    read, made = x * 2, []
    with torch.autocast("cpu", torch.bfloat16):
        made = [ops.linear(read, w, None, spec, states, record=True, last=last) for w in weights]
    torch.autograd.backward(made, [torch.randn(y.shape).bfloat16() for y in made])
    return [*(y.detach() for y in made), x.grad, *(w.grad for w in weights)]


if __name__ == "__main__":
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    scaled_mm.capability = lambda device: capability
    F.scaled_mm = tensor_core_matmul
    for kind in (StatefulScaling, *StatefulScaling.__subclasses__()):
        kind.waits = lambda self, state: True  # as on a GPU, whose values the host does not read
    capability = 9, 0
    linear, made = import_module("halfstep.ops.linear"), native.native_layer
    native.plain = blocks.plain = layouts.plain = is_dense
    rounded, rounding = [], native.Rounding.__call__

    def counted(self, x, *given):
        rounded.append(tuple(x.shape))
        return rounding(self, x, *given)

    native.Rounding.__call__ = counted
    for name in sys.argv[1:] or CASES:
        asked, capability = [], (10, 0) if name in ("mxfp8", "nvfp4") else (9, 0)
        linear.native_layer = lambda *given: None
        expected, expected_siblings = layer_results(name, 1), sibling_results(name, 2, None)

        def native_layer(*given, asked=asked):
            asked.append(made(*given))
            return asked[-1]

        linear.native_layer = native_layer
        operand.amax_of, kept = lambda x, unless=None, found=None: largest_of(x, unless, found), operand.amax_of
        wrong, weights = [], []
        for cached in (False, True):
            rounded.clear()
            found = layer_results(name, 1, cached=cached)
            weights.append(rounded.count(CASES[name][:0:-1]))
            wrong += [place for place, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)]
        rounded.clear()
        found, inputs = sibling_results(name, 2, LastInput()), CASES[name][:2]
        wrong += [
            f"sibling {place}"
            for place, pair in enumerate(zip(found, expected_siblings, strict=True))
            if not torch.equal(*pair)
        ]
        operand.amax_of = kept
        report = {"triton": triton.__version__, "recipe": name, "wrong": wrong, "native": all(asked) and len(asked)}
        print(json.dumps(report | {"weights": weights, "inputs": rounded.count(inputs)}), flush=True)
