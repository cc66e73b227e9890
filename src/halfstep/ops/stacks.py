"""Products of stacks of matrices, such as attention's, whose operands are quantised."""

from typing import Any

import torch
from torch import Tensor

from halfstep.kernels import carried
from halfstep.kernels.rotation import rotate
from halfstep.kernels.watched import unseen
from halfstep.ops.function import apart, run
from halfstep.ops.matmul import accumulated
from halfstep.ops.noise import KEY, Seeds, seeds_of
from halfstep.ops.once import Once, once
from halfstep.ops.operand import Operand, operand, signs_of
from halfstep.ops.plain import factors_of, matrix, plain_stacked
from halfstep.quant.rounding import Seed
from halfstep.recipe import LinearSpec, Matmul


def stacked_linear(
    x: Tensor, weight: Tensor, spec: LinearSpec, dtype: torch.dtype, noise: Tensor | None = None
) -> Tensor:
    """x (..., rows, in) times weight (..., out, in) transposed: (..., rows, out) in float32.

    Each matrix of the stack is a linear layer's product, and so are the two of its backward; scales of a whole tensor
    are scales of the whole stack.

    Args:
        spec: how the six operands are rounded; its scalings keep no state.
        dtype: of operands that are not rounded.
        noise: the key that noise and signs follow from; None draws them from torch's default generator.
    """
    if not spec.rounds:
        return plain_stacked(x, weight, dtype, factors_of(spec, x.shape[-2], *weight.shape[-2:]))
    return run(_Rounded, x, weight, spec, dtype, noise)  # type: ignore[no-any-return]


class _Rounded(Once):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, spec: LinearSpec, dtype: torch.dtype, noise: Tensor | None) -> Tensor:
        return apart(_product(x, weight, spec.output, dtype, *_seeds(noise, x, spec.output)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.spec, ctx.dtype, ctx.noise = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = once(_form, grads[0], *ctx.saved_tensors, ctx.needs_input_grad[:2], ctx.spec, ctx.dtype, ctx.noise)
        return *found, None, None, None


def _form(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    needs: tuple[bool, ...],
    spec: LinearSpec,
    dtype: torch.dtype,
    noise: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of x and weight, as far as they are needed."""
    grad_x = grad_weight = None
    first, second = _seeds(noise, grad, spec.grad_input, spec.grad_weight)
    if needs[0]:
        grad_x = _product(grad, weight.mT, spec.grad_input, dtype, first).to(x.dtype)
    if needs[1]:
        grad_weight = _product(grad.mT, x.mT, spec.grad_weight, dtype, second).to(weight.dtype)
    return grad_x, grad_weight


def _seeds(noise: Tensor | None, x: Tensor, *products: Matmul) -> tuple[Seeds, ...]:
    return seeds_of(None if noise is None else {KEY: noise}, x, *products)


def _product(lhs: Tensor, rhs: Tensor, matmul: Matmul, dtype: torch.dtype, seeds: Seeds) -> Tensor:
    """lhs (..., rows, shared) times rhs (..., columns, shared) transposed, both rounded along the shared dimension."""
    with torch.autocast(lhs.device.type, enabled=False):
        times, signs = matmul.multiplier, signs_of(matmul, lhs, rhs, seeds.signs)
        multiplier = None if times is None else times.of(lhs.shape[-2], lhs.shape[-1], rhs.shape[-2])
        with unseen():
            if signs is not None:
                lhs, rhs = rotate(lhs, signs), rotate(rhs, signs)
            a, b = _operand(lhs, matmul.lhs, dtype, seeds.lhs), _operand(rhs, matmul.rhs, dtype, seeds.rhs)
        if matmul.accumulate is None:
            product = carried.run_stacked(a.values, b.values.mT, multiplier)
        else:
            product = accumulated(a.values.float(), b.values.mT.float(), matmul.accumulate)
            product = product if multiplier is None else product * multiplier
        for scale in (a.scale, b.scale):
            product = product if scale is None else product * scale
        return product


def _operand(x: Tensor, quantizer: Any, dtype: torch.dtype, seed: Seed | None) -> Operand:
    made = operand(matrix(x), quantizer, dtype, units=False, seed=seed).widened(dtype)
    return Operand(made.values.view(x.shape), made.scale)
