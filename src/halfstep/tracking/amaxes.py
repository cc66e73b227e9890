"""The largest magnitudes of what a model's layers take, hold and get back, and what of it saturates, in one step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.bits.histogram import ExponentHistogram
from halfstep.nn.scaling import states_of
from halfstep.ops import amax_of, values_of
from halfstep.ops.part import part_of
from halfstep.quant import Quantizer, rotate
from halfstep.quant.quantizer import as_rows
from halfstep.recipe import LinearSpec, Matmul
from halfstep.tracking.nonfinite import tensors_in
from halfstep.tracking.operands import shares


@dataclass
class Amaxes:
    """Of one step, by tensor, in the order of computing."""

    amaxes: dict[str, float] = field(default_factory=dict)
    """The largest magnitude; infinite where there is a NaN."""
    saturated: dict[str, float] = field(default_factory=dict)
    """Of what a recipe rounds, the share beyond the format's largest value, after scaling."""
    underflowed: dict[str, float] = field(default_factory=dict)
    """Of the same, the share of what is not zero that becomes zero."""


@contextmanager
def amaxes(model: nn.Module, enabled: bool = True) -> Iterator[Amaxes]:
    """While active, a forward and its backward write down the largest magnitudes of tensors.

    The tensors are, of each layer with parameters and no layers within: `input of PATH`, its parameters by name
    (`weight of PATH`), and `grad_output of PATH`. A layer that is called more than once keeps its largest; what is not
    floating, such as tokens, is left out.

    >>> import torch
    >>> layer = nn.Sequential(nn.Linear(2, 1, bias=False))
    >>> _ = layer[0].weight.data.fill_(0.5)
    >>> with amaxes(layer) as found:
    ...     layer(torch.tensor([[1.0, -3.0]])).sum().backward()
    >>> found.amaxes
    {'input of 0': 3.0, 'weight of 0': 0.5, 'grad_output of 0': 1.0}
    """
    found = Amaxes()
    layers = [
        (path or "the model", module)
        for path, module in model.named_modules()
        if enabled and not any(module.children()) and any(True for _ in module.parameters(recurse=False))
    ]
    with ExitStack() as hooks:
        for path, module in layers:
            hooks.enter_context(module.register_forward_hook(_watch(found, path, module)))
        yield found


def _watch(found: Amaxes, path: str, module: nn.Module) -> Any:
    """A hook of a layer's forward."""
    rounded: dict[str, tuple[Matmul, Quantizer | None]] = {}
    spec = part_of(module).linear
    if isinstance(spec, LinearSpec) and isinstance(module, nn.Linear):
        output, back = spec.output, spec.grad_input
        rounded = {"input": (output, output.lhs), "weight": (output, output.rhs), "grad_output": (back, back.lhs)}

    def note(operand: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point() or not tensor.numel():
            return
        name, largest = f"{operand} of {path}", float(amax_of(tensor.detach()))
        largest = math.inf if math.isnan(largest) else largest
        found.amaxes[name] = max(found.amaxes.get(name, 0.0), largest)
        product, quantizer = rounded.get(operand, (None, None))
        if product is not None and quantizer is not None:
            matrix = as_rows(tensor.detach())
            matrix = matrix if product.hadamard is None else rotate(matrix, product.hadamard.still.signs(matrix.device))
            saturated, underflowed = shares(matrix, quantizer, states_of(module).get(operand))
            found.saturated[name] = max(found.saturated.get(name, 0.0), saturated)
            found.underflowed[name] = max(found.underflowed.get(name, 0.0), underflowed)

    def after_forward(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor in tensors_in(args):
            note("input", tensor)
        for name, parameter in module.named_parameters(recurse=False):
            note(name, values_of(parameter))
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: note("grad_output", grad))  # type: ignore[no-untyped-call]

    return after_forward


_LOWEST, _HIGHEST = -149, 128  # floor(log2 |x|) of float32's values; infinities and NaN are counted apart


def exponents(tensors: Iterable[Tensor]) -> ExponentHistogram:
    """The histogram over all values of some tensors, of any floating dtype."""
    bins = torch.zeros(_HIGHEST - _LOWEST + 1, dtype=torch.int64, device="cpu")
    zeros = nonfinite = 0
    for tensor in tensors:
        flat = tensor.detach().float().reshape(-1)
        stored = flat.view(torch.int32) >> 23 & 255  # of a normal number, its exponent + 127
        found = torch.bincount(stored, minlength=256).cpu()
        bins[-126 - _LOWEST : 128 - _LOWEST] += found[1:255]
        nonfinite += int(found[255])
        if found[0]:
            small = flat[stored == 0]
            subnormal = small[small != 0]
            zeros += len(small) - len(subnormal)
            _, exponent = torch.frexp(subnormal)  # |x| = f * 2^exponent with f in [1/2, 1): the floor is one less
            bins += torch.bincount(exponent.long() - 1 - _LOWEST, minlength=len(bins)).cpu()
    filled = torch.nonzero(bins).reshape(-1).tolist()
    return ExponentHistogram({i + _LOWEST: int(bins[i]) for i in filled}, zeros, nonfinite)
