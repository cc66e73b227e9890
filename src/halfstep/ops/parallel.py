"""A linear layer with rounded operands whose weight is sharded by columns or rows (tensor parallel).

If the tokens of its input are sharded too (sequence parallel), ranks exchange them as codes.

Each rank multiplies its shards. Operands have the same codes as in one process: if a tile extends over several ranks,
they agree on its amax by an all-reduce. Where outputs are summed over ranks, each rank's output is rounded first.
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
    """How an input's rows (tokens) are sharded over ranks.

    Args:
        shape: the shape of the whole input.
        dim: the sharded dimension; all shards have one size.
    """

    mesh: Any
    shape: torch.Size
    dim: int

    @property
    def before(self) -> int:
        """How many separate runs of consecutive rows of the whole input a rank has."""
        return prod(self.shape[: self.dim])

    def gather(self, own: Tensor) -> Tensor:
        """All-gather: the rows of all ranks, in the order of the whole input. Each rank has the same number."""
        group = self.mesh.get_group()
        everyone = own.new_empty((dist.get_world_size(group), *own.shape))
        given = own.contiguous().flatten().view(torch.uint8)  # gloo sends no float8
        dist.all_gather_into_tensor(everyone.flatten().view(torch.uint8), given, group)
        return everyone.view(len(everyone), self.before, -1, *own.shape[1:]).transpose(0, 1).flatten(0, 2)

    def all_of(self, own: Quantized, rows: int) -> Quantized:
        """The codes of the first `rows` rows of each rank, gathered; so are the scales unless all rows share them."""
        scales = own.quantizer.scales
        spread = "codes", *(own.tensors if scales is not None and scales.tile.rows else ())
        tensors = {name: self.gather(each[:rows]) if name in spread else each for name, each in own.tensors.items()}
        return replace(own, shape=(len(tensors["codes"]), own.shape[-1]), tensors=tensors)

    def scatter(self, whole: Tensor, like: Tensor) -> Tensor:
        """Reduce-scatter: this rank's shard, with the shape and dtype of `like`, of the sum of all ranks' tensors."""
        given: Any = dist  # torch.distributed.tensor is imported already, since there are DTensors
        parts = whole.view(self.shape).to(like.dtype)
        summed = given.tensor.DTensor.from_local(parts, self.mesh, [given.tensor.Partial()], run_check=False)
        return summed.redistribute(placements=[given.tensor.Shard(self.dim)]).to_local()  # type: ignore[no-any-return]


def tokens_of(x: Any, mesh: Any) -> Tokens:
    """The `Tokens` of a DTensor that is sharded along a dimension other than its last.

    Raises:
        ModelError: the shards are not of one size.
    """
    dim = x.placements[0].dim % x.dim()
    if x.shape[dim] % mesh.size():
        raise ModelError(
            f"dimension {dim} of an input of shape {tuple(x.shape)} is sharded over {mesh.size()} ranks, which must "
            "have equal shards: pad it to a multiple, or take ColwiseParallel, which allows unequal ones"
        )
    return Tokens(mesh, x.shape, dim)


# ---- tensor parallel -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cut:
    """The dimension along which each of a layer's tensors is sharded (None: replicated), and the process group."""

    group: Any
    input: int | None
    weight: int
    grad_output: int | None
    first: bool
    """Whether this is the group's first rank, which adds the bias if outputs are summed."""
    tokens: Tokens | None = None
    """How the input's tokens are sharded (sequence parallel); None if they are not."""


def parallel_linear(
    x: Any, weight: Any, bias: Any, spec: LinearSpec, states: States, record: bool, other: str | None
) -> Tensor:
    """`ops.linear` of DTensors, y being one too, placed as by torch.distributed.tensor.parallel or `GatherCodes`.

    `ColwiseParallel`: weight sharded along out, x replicated. `RowwiseParallel`: weight and x sharded along in.
    `halfstep.distributed.GatherCodes`: weight sharded along out, x by tokens.

    Args:
        other: the name of an option of the call that is not supported here, for the error; or None.

    Raises:
        ModelError: the tensors are placed otherwise, `other` is given, or the spec needs more of a tensor than a rank
            has.
    """
    placed = _placed(x, weight)
    _check(spec, other)
    mesh = weight.device_mesh
    given: Any = dist  # torch.distributed.tensor is imported already, since there are DTensors
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
    """How weight and x are sharded: "columns" (of y), "tokens" (columns of y, and x by tokens) or "rows" (of w^T)."""
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
        f"a recipe rounds the operands of a matmul with a weight that is spread over ranks as {found}, and an input "
        f"that is {what}. Expected torch.distributed.tensor.parallel's ColwiseParallel or RowwiseParallel on a mesh of "
        "one dimension (parallelize_module(model, mesh, {name: ColwiseParallel()}) after halfstep.apply), fully_shard, "
        "or module_filter to leave these layers unrounded"
    )


def _check(spec: LinearSpec, other: str | None) -> None:
    """Raise if the spec, or the option `other`, needs more of a tensor than its shard on a rank."""
    for product in (spec.output, spec.grad_input, spec.grad_weight):
        other = other or _beyond(product)
    for quantizer in spec.quantizers:
        other = other or _whole(quantizer)
    if spec.estimates:
        other = other or "an estimator of the rounding's derivative"
    if other is not None:
        raise ModelError(
            f"{other}, in a layer whose weight is sharded (tensor parallel): it needs more than one rank's shard "
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
    """The autograd Function of one rank's shards: y, and an anchor as of `linear_passes.Rounded`."""

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


# ---- operands of a rank's shard --------------------------------------------------------------------------------------


def _input(
    x: Tensor, quantizer: Quantizer | None, dtype: torch.dtype, cut: _Cut, state: Tensor | None, record: bool,
    dim: int = 1,
) -> Operand:  # fmt: skip
    """The operand of this rank's shard of the input; if tokens are sharded, of the whole input, gathered as codes, with
    those scales that differ from rank to rank."""
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
    """`ops.operand` of a rank's shard of a matrix, with the scales of the whole matrix.

    If tiles extend over ranks, a row or column with the amaxes of all ranks is appended, and removed after rounding.

    Args:
        along: the dimension along which the matrix is sharded; None: it is not.
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
    """Whether the scale comes from a state, whose amaxes ranks agree on once a step."""
    return state is not None and quantizer.stateful is not None and not quantizer.stateful.waits(state)


def _with_maxima(x: Tensor, quantizer: Quantizer, group: Any, along: int, pieces: int = 1) -> tuple[Tensor, int | None]:
    """(x, None), or, if tiles extend over ranks, x with a row or column that holds the amaxes of all ranks, and the
    dimension along which it was appended.

    Args:
        along: the dimension along which the matrix is sharded.
        pieces: the number of separate runs of consecutive rows in x.
    """
    tile = quantizer.tiling.tile
    own = (tile.rows, tile.columns)
    if own[along]:
        if x.shape[along] // pieces % own[along]:
            whose = f"{pieces} pieces of {x.shape[0] // pieces}" if pieces > 1 else x.shape[0]
            raise ModelError(
                f"a rank's shard of a matrix is {whose} x {x.shape[1]}, and tiles that share a scale are {tile}: a "
                f"tile would be split over two ranks. Shard dimensions that are multiples of {own[along]} times the "
                "ranks"
            )
        return x, None
    if not quantizer.tiling.rule.reads:
        return x, None
    side = 0 if not own[0] and not own[1] else along
    found = _largest(x, own, group)
    more = found.expand(1, x.shape[1]) if side == 0 else found.expand(x.shape[0], 1)
    return torch.cat([x, more], side), side


def _largest(x: Tensor, tile: tuple[int, int], group: Any) -> Tensor:
    """The amax over all ranks of a whole tensor, of each row or of each column, as `tile` says. NaN becomes infinity,
    since backends may lose NaN in a maximum."""
    dims = [dim for dim in (0, 1) if not tile[dim]] if 0 in tile else [0, 1]
    own = x.detach().abs().amax(dims, keepdim=True).float() if x.numel() else _none(x, dims)
    own = own.nan_to_num(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(own, dist.ReduceOp.MAX, group)
    return own.to(x.dtype)


def _none(x: Tensor, dims: list[int]) -> Tensor:
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    return torch.zeros(shape, dtype=torch.float32, device=x.device)
