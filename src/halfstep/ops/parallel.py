"""A linear layer whose weight is spread over ranks by columns or rows (tensor parallel), with rounded operands.

Where the tokens of its input are spread too (sequence parallel), ranks send them as codes.

Each rank multiplies its part. Operands have the codes that they have in one process: where a scale's tile goes on on
other ranks, each of them takes in the largest magnitude of all. What ranks add up is a sum of rounded products.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.errors import ModelError
from halfstep.ops.casts import Quantized, quantize
from halfstep.ops.function import Once, no_autocast, once
from halfstep.ops.linear_passes import States, bias_gradient, product_dtype
from halfstep.ops.operand import Operand, decoded, operand, stored
from halfstep.ops.plain import matrix, unflatten
from halfstep.ops.sides import product_of
from halfstep.ops.subclasses import arrived
from halfstep.quant import TENSOR, Quantizer
from halfstep.recipe import LinearSpec, Matmul, linear_text


# ---- sequence parallel -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """How the rows of an input lie on ranks.

    Args:
        shape: of the whole input.
        dim: the dimension that is cut, into parts of one size.
    """

    mesh: Any
    shape: torch.Size
    dim: int

    @property
    def before(self) -> int:
        """How often a rank has rows that follow one another in the whole input."""
        return prod(self.shape[: self.dim])

    def gather(self, own: Tensor) -> Tensor:
        """The rows of all ranks, in the order of the whole input, of as many on each rank."""
        group = self.mesh.get_group()
        everyone = own.new_empty((dist.get_world_size(group), *own.shape))
        given = own.contiguous().flatten().view(torch.uint8)  # gloo sends no float8
        dist.all_gather_into_tensor(everyone.flatten().view(torch.uint8), given, group)
        return everyone.view(len(everyone), self.before, -1, *own.shape[1:]).transpose(0, 1).flatten(0, 2)

    def all_of(self, own: Quantized, rows: int) -> Quantized:
        """The codes of all ranks, of each rank's first rows, and scales that rows do not share with other ranks."""
        scales = own.quantizer.scales
        spread = "codes", *(own.tensors if scales is not None and scales.tile.rows else ())
        tensors = {name: self.gather(each[:rows]) if name in spread else each for name, each in own.tensors.items()}
        return replace(own, shape=(len(tensors["codes"]), own.shape[-1]), tensors=tensors)

    def scatter(self, whole: Tensor, like: Tensor) -> Tensor:
        """A rank's part, of the shape and dtype of `like`, of the sum of all ranks' tensors."""
        given: Any = dist  # whose module of DTensors is imported, since there are some
        parts = whole.view(self.shape).to(like.dtype)
        summed = given.tensor.DTensor.from_local(parts, self.mesh, [given.tensor.Partial()], run_check=False)
        return summed.redistribute(placements=[given.tensor.Shard(self.dim)]).to_local()  # type: ignore[no-any-return]


def tokens_of(x: Any, mesh: Any) -> Tokens:
    """Those of a DTensor that is cut along another dimension than its last.

    Raises:
        ModelError: ranks have not as many each.
    """
    dim = x.placements[0].dim % x.dim()
    if x.shape[dim] % mesh.size():
        raise ModelError(
            f"dimension {dim} of an input of shape {tuple(x.shape)} is spread over {mesh.size()} ranks, which send "
            "codes of as many tokens each: pad it to a multiple, or take ColwiseParallel, which gathers what there is"
        )
    return Tokens(mesh, x.shape, dim)


# ---- tensor parallel -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cut:
    """Along which dimension, if any, each of a layer's tensors is cut, and among which ranks."""

    group: Any
    input: int | None
    weight: int
    grad_output: int | None
    first: bool
    """Whether this rank is the first of them, which adds the bias where outputs are summed."""
    tokens: Tokens | None = None


def parallel_linear(
    x: Any, weight: Any, bias: Any, spec: LinearSpec, states: States, record: bool, other: str | None
) -> Tensor:
    """`ops.linear` of DTensors as `ColwiseParallel` (weight cut along its outputs, x whole) and `RowwiseParallel` (cut
    along its inputs, as x is) of torch.distributed.tensor.parallel leave them, and `halfstep.distributed.GatherCodes`
    (weight cut along its outputs, x by tokens).

    Args:
        other: what the call asks for beside, which it does not do.

    Raises:
        ModelError: they are placed otherwise, or what the recipe does there no rank can do with its part.
    """
    placed = _placed(x, weight)
    _check(spec, other)
    mesh = weight.device_mesh
    given: Any = dist  # whose module of DTensors is imported, since there are some
    shard, partial = given.tensor.Shard, given.tensor.Partial
    group = mesh.get_group()
    colwise, tokens = placed != "rows", tokens_of(x, mesh) if placed == "tokens" else None
    along = 1 if not colwise else None if tokens is None else 0
    cut = _Cut(group, along, int(not colwise), 1 if colwise else None, dist.get_rank(group) == 0, tokens)
    own_x = x.to_local(grad_placements=[partial()] if placed == "columns" else None)
    own_bias = None if bias is None else bias.to_local()
    y = _Parallel.apply(own_x, weight.to_local(), own_bias, spec, states, record, cut, product_dtype(own_x))[0]  # type: ignore[no-untyped-call]
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, dtype=y.dtype, device="meta").stride()
    placement = shard(len(shape) - 1) if colwise else partial()
    return type(x).from_local(y, mesh, [placement], run_check=False, shape=shape, stride=stride)  # type: ignore[no-any-return]


def _placed(x: Any, weight: Any) -> str:
    """Whether the weight is cut by `columns` of y, or so and x by `tokens`, or by `rows` of w^T, and x fits it."""
    found = [str(each) for each in weight.placements]
    if hasattr(x, "device_mesh") and len(found) == 1:
        given, last = x.placements[0], x.dim() - 1
        if weight.placements[0].is_shard(0) and given.is_replicate():
            return "columns"
        if weight.placements[0].is_shard(0) and given.is_shard() and given.dim not in (last, -1):
            return "tokens"
        if weight.placements[0].is_shard(1) and (given.is_shard(last) or given.is_shard(-1)):
            return "rows"
    what = f"as {[str(each) for each in x.placements]}" if hasattr(x, "device_mesh") else "no DTensor"
    raise ModelError(
        f"a recipe rounds the operands of a product with a weight that is spread over ranks as {found}, and an input "
        f"that is {what}. Expected torch.distributed.tensor.parallel's ColwiseParallel or RowwiseParallel on a mesh of "
        "one dimension (parallelize_module(model, mesh, {name: ColwiseParallel()}) after halfstep.apply), fully_shard, "
        "or module_filter to leave these layers unrounded"
    )


def _check(spec: LinearSpec, other: str | None) -> None:
    """Refuse what takes more of a tensor than a rank has of it."""
    for product in (spec.output, spec.grad_input, spec.grad_weight):
        other = other or _beyond(product)
    for quantizer in spec.quantizers:
        other = other or _whole(quantizer)
    if spec.estimates:
        other = other or "an estimator of the rounding's derivative"
    if other is not None:
        raise ModelError(
            f"{other}, in a layer whose weight is spread over ranks (tensor parallel): no rank has all that it takes "
            f"({linear_text(spec)}). Take 'fp8-rowwise', 'fp8-current', 'fp8-delayed', 'fp8-block', 'mxfp8' or "
            "'bf16-mixed', shard by fully_shard, or leave these layers unrounded by module_filter"
        )


def _beyond(product: Matmul) -> str | None:
    if product.multiplier is not None:
        return "a multiplier, which follows from the whole product's sizes"
    if product.accumulate is not None:
        return "a sum with an accumulator of its own, which goes on over ranks"
    if product.hadamard is not None:
        return "a Hadamard transform"
    if product.draws:
        return "noise, which each rank would draw for its own part"
    return "scales that the other operand takes in" if product.folds else None


def _whole(quantizer: Quantizer) -> str | None:
    scales = quantizer.scales
    if quantizer.clamp is not None or quantizer.outliers is not None:
        return "a clamp at quantiles, or outliers kept apart"
    if scales is not None and (scales.rule.two_level or quantizer.inner is not None or quantizer.by_rows):
        return f"{quantizer.format.name} with scales {scales}"
    return None


class _Parallel(Once):
    """One rank's part of the layer: y, and a number that depends on whatever y does, as in `Rounded`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
        spec, states, record, cut, dtype = options
        x, weight = arrived(x), arrived(weight)
        rows = matrix(x)
        with no_autocast(x):
            lhs = _input(rows, spec.output.lhs, dtype, cut, states.get("input"), record)
            rhs = _operand(weight, spec.output.rhs, dtype, cut, cut.weight, states.get("weight"), record)
            added = bias if cut.weight == 0 or cut.first else None
            y = product_of(lhs, rhs.t(), added, dtype, spec.output, rows.shape[1])
        anchor = y.new_empty(())
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(anchor, x, weight)
        ctx.options, ctx.bias = options, None if bias is None else bias.dtype
        return unflatten(y, x if cut.tokens is None else x.new_empty(cut.tokens.shape, device="meta")), anchor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *once(_gradients, grads[0], ctx.needs_input_grad[:3], ctx.bias, ctx.options, *ctx.saved_tensors), *[
            None
        ] * 5


def _gradients(
    grad: Tensor, needs: tuple[bool, ...], bias: torch.dtype | None, options: Any, _: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor | None, ...]:
    spec, states, record, cut, dtype = options
    rows, grad_x, grad_weight, grad_bias = matrix(arrived(grad)), None, None, None
    state, first, second = states.get("grad_output"), spec.grad_input, spec.grad_weight
    with no_autocast(rows):
        if needs[0]:
            lhs = _operand(rows, first.lhs, dtype, cut, cut.grad_output, state, record)
            rhs = _operand(weight, first.rhs, dtype, cut, cut.weight, states.get("weight"), False, 0)
            grad_x = product_of(lhs, rhs, None, dtype, first, rows.shape[1])
            grad_x = grad_x.view(x.shape).to(x.dtype) if cut.tokens is None else cut.tokens.scatter(grad_x, x)
        if needs[1]:
            lhs = _operand(rows, second.lhs, dtype, cut, cut.grad_output, state, record and not needs[0], 0)
            rhs = _input(matrix(x), second.rhs, dtype, cut, states.get("input"), False, 0)
            grad_weight = product_of(lhs.t(), rhs, None, dtype, second, len(rows)).to(weight.dtype)
        if needs[2]:
            grad_bias = bias_gradient(rows, None).to(bias)
    return grad_x, grad_weight, grad_bias


# ---- operands of a rank's part ---------------------------------------------------------------------------------------


def _input(
    x: Tensor, quantizer: Quantizer | None, dtype: torch.dtype, cut: _Cut, state: Tensor | None, record: bool,
    dim: int = 1,
) -> Operand:  # fmt: skip
    """A rank's part of the input, or, where tokens are spread, all of it: each rank sends the codes of its own, and the
    scales that those have alone."""
    if cut.tokens is None:
        return _operand(x, quantizer, dtype, cut, cut.input, state, record, dim)
    if quantizer is None:
        return Operand(cut.tokens.gather(x.to(dtype)))
    if quantizer.scales is None or quantizer.scales.tile == TENSOR:
        made = _operand(x, quantizer, dtype, cut, cut.input, state, record, dim)
        sent = quantize(made.values, Quantizer(quantizer.format))
        return Operand(cut.tokens.all_of(sent, len(x)).dequantize(made.values.dtype), made.scale)
    down = quantizer if dim else quantizer.down
    own = stored(_with_maxima(x, down, cut.group, 0, cut.tokens.before)[0], down)
    return decoded(cut.tokens.all_of(own, len(x)), dtype)


def _operand(
    x: Tensor, quantizer: Quantizer | None, dtype: torch.dtype, cut: _Cut, along: int | None, state: Tensor | None,
    record: bool, dim: int = 1,
) -> Operand:  # fmt: skip
    """`ops.operand` of a part of a matrix that is cut along one dimension, or not at all, with the whole one's scales.

    Where a tile goes on on other ranks, a row or column is added that holds the largest magnitudes of all, and taken
    off again when it has been rounded.
    """
    down = quantizer if quantizer is None or dim else quantizer.down
    if quantizer is None or quantizer.scales is None or along is None or _is_known(quantizer, state):
        return operand(x, down, dtype, state, record, dim=dim)
    assert down is not None
    x, added = _with_maxima(x, down, cut.group, along)
    made = operand(x, down, dtype, state, record, dim=dim)
    if added is None:
        return made
    values = made.values[:-1] if added == 0 else made.values[:, :-1]
    return Operand(values.contiguous() if added else values, made.scale)


def _is_known(quantizer: Quantizer, state: Tensor | None) -> bool:
    """Whether a scale follows from a state, on whose amaxes ranks agree once a step."""
    return state is not None and quantizer.stateful is not None and not quantizer.stateful.waits(state)


def _with_maxima(x: Tensor, quantizer: Quantizer, group: Any, along: int, pieces: int = 1) -> tuple[Tensor, int | None]:
    """A part, in so many pieces, of a matrix that is cut along a dimension; and where tiles go on on other ranks, along
    which one a row or column was added that holds the largest magnitudes of all."""
    tile = quantizer.tiling.tile
    own = (tile.rows, tile.columns)
    if own[along]:
        if x.shape[along] // pieces % own[along]:
            whose = f"{pieces} pieces of {x.shape[0] // pieces}" if pieces > 1 else x.shape[0]
            raise ModelError(
                f"a rank's part of a matrix is {whose} x {x.shape[1]}, and tiles that share a scale are {tile}: a "
                f"tile would lie on two ranks. Spread dimensions that are multiples of {own[along]} times the ranks"
            )
        return x, None
    if not quantizer.tiling.rule.reads:
        return x, None
    side = 0 if not own[0] and not own[1] else along
    found = _largest(x, own, group)
    more = found.expand(1, x.shape[1]) if side == 0 else found.expand(x.shape[0], 1)
    return torch.cat([x, more], side), side


def _largest(x: Tensor, tile: tuple[int, int], group: Any) -> Tensor:
    """The largest magnitude of a tensor's, row's or column's parts on all ranks; a NaN, which backends lose in their
    maximum, counts as an infinity."""
    dims = [dim for dim in (0, 1) if not tile[dim]] if 0 in tile else [0, 1]
    own = x.detach().abs().amax(dims, keepdim=True).float() if x.numel() else _none(x, dims)
    own = own.nan_to_num(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(own, dist.ReduceOp.MAX, group)
    return own.to(x.dtype)


def _none(x: Tensor, dims: list[int]) -> Tensor:
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    return torch.zeros(shape, dtype=torch.float32, device=x.device)
