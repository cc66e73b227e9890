"""Custom operators, opaque nodes under torch.compile; the amax of a tensor; and seeds for stochastic rounding.

Traced, a call is one node of the graph. Dispatch modes that watch operators see calls on tensors without values too
(torch's FakeTensors), for which no kernel can run.

Quantizing the operands of a matmul writes in place, to scaling states too. So it is hidden from selective activation
checkpointing and repeated in the backward pass whatever the policy says. The matmul itself is visible, and its output
is cached where the policy says so.

The amax of a tensor, and seeds hashed from a key and the tensor's values, come from a kernel where one supports the
call, else from torch; and from an operator under torch.compile.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch as dispatch, checkpoint

from halfstep.kernels.cpu import amax
from halfstep.kernels.gpu import amax as gpu_amax, cast, here, plain
from halfstep.quant.rounding import Seed, draw_seed
from halfstep.quant.tracing import has_memory


_LIBRARY = torch.library.Library("halfstep", "FRAGMENT")


# ---- operators -------------------------------------------------------------------------------------------------------


class Operator:
    """Calls `eager`; under torch.compile, the operator `halfstep::NAME`, which runs `inside` when the graph runs.

    Args:
        schema: torch's, such as `round(Tensor x, Tensor(a!) out, str key) -> ()`. Formats and rules are passed as text.
        eager: the function called outside of tracing.
        inside: the operator's implementation; `eager` where it takes the same arguments.
        terms: converts the arguments of `eager` to those of the operator.
        like: for an operator with a result, makes an empty tensor of the result's shape and dtype (the Meta kernel).
    """

    def __init__(
        self,
        schema: str,
        eager: Callable[..., Any],
        inside: Callable[..., Any] | None = None,
        terms: Callable[..., tuple[Any, ...]] | None = None,
        like: Callable[..., Any] | None = None,
    ) -> None:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, inside or eager, "CompositeExplicitAutograd")
        _LIBRARY.impl(name, like or _nothing, "Meta")
        self._eager, self._terms = eager, terms
        self._node = getattr(torch.ops.halfstep, name)

    def __call__(self, *arguments: Any) -> Any:
        return self.traced(*arguments) if torch.compiler.is_compiling() else self._eager(*arguments)

    def traced(self, *arguments: Any) -> Any:
        """Call the operator, whether or not torch is tracing."""
        return self._node(*(arguments if self._terms is None else self._terms(*arguments)))


def _nothing(*arguments: Any) -> None:
    """The Meta kernel of an operator that writes in place and has no result."""


# ---- tensors without values ------------------------------------------------------------------------------------------

_LIBRARY.define("follow(Tensor x, Tensor(a!) out) -> Tensor(a!)")
_LIBRARY.impl("follow", lambda x, out: out, "CompositeExplicitAutograd")
FOLLOW = torch.ops.halfstep.follow.default
"""The operator by which `blank` records that one tensor is computed from another."""


def blank(x: Tensor, *outs: Tensor) -> bool:
    """Whether x has no values (a FakeTensor), so that nothing is computed; then records for dispatch modes that watch
    operators that `outs` are computed from x."""
    if not hasattr(x, "fake_mode"):
        return False
    for out in outs:
        FOLLOW(x, out)
    return True


# ---- selective activation checkpointing ------------------------------------------------------------------------------

_KEEPERS = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode
_NOTHING = nullcontext()


def _keepers() -> Sequence[Any]:
    """The active dispatch modes of selective checkpointing, which may cache operators' outputs: none while a graph is
    traced."""
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return ()
    return [mode for mode in dispatch._get_current_dispatch_mode_stack() if isinstance(mode, _KEEPERS)]


def unseen() -> AbstractContextManager[Any]:
    """A context in which selective activation checkpointing caches no operator's output."""
    keepers = _keepers()
    seen = keepers and keepers[-1] is dispatch._get_current_dispatch_mode()
    return dispatch._pop_mode_temporarily() if seen else _NOTHING


def times(x: Tensor, factor: Tensor | float) -> Tensor:
    """x * factor, in place (x must have no other reference), or out of place while selective checkpointing may cache
    x."""
    return x * factor if _keepers() else x.mul_(factor)


def plus(x: Tensor, y: Tensor) -> Tensor:
    """x + y, in place or not, as `times`."""
    return x + y if _keepers() else x.add_(y)


# ---- the largest magnitude -------------------------------------------------------------------------------------------


def amax_of(x: Tensor, unless: Tensor | None = None, found: Tensor | None = None) -> Tensor:
    """max |x|, a float32 scalar: 0 for an empty tensor, NaN where x has a NaN.

    Args:
        unless: a float32 scalar; where it is not 0, max |x| is not needed, and a GPU or a traced graph does not read x.
        found: see `kernels.gpu.amax.run`, the only path that uses it.
    """
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    if x.is_cpu and has_memory(x) and (found := amax.run(x)) is not None:
        return found
    if plain(x):
        return gpu_amax.run(x, unless, found)
    if unless is None:
        return _by_torch(x)
    out = x.new_empty((), dtype=torch.float32)
    _AMAX(x.detach(), unless, out)
    return out


def _by_torch(x: Tensor) -> Tensor:
    low, high = torch.aminmax(x.detach())  # one pass, bound by memory bandwidth; abs().amax() would be two
    return torch.maximum(-low, high).float()


def _amax(x: Tensor, unless: Tensor, out: Tensor) -> None:
    asked = x.is_cuda or bool(unless == 0)  # on a GPU only the kernel reads it
    out.copy_(amax_of(x.contiguous(), unless) if asked else torch.zeros((), dtype=torch.float32, device="cpu"))


_AMAX = Operator(
    "amax(Tensor x, Tensor unless, Tensor(a!) out) -> ()", lambda x, unless, out: out.copy_(_by_torch(x)), _amax
)


# ---- seeds -----------------------------------------------------------------------------------------------------------

_SAMPLES = 1024
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN, _STEP, _PLACE = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xAF251AF3B0F025B5  # odd, otherwise random
_MIXERS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)


def seeds(x: Tensor, key: Tensor, count: int) -> Sequence[Seed]:
    """`count` 64-bit seeds for the noise of a tensor: a hash of the key and of a sample of the tensor's values.

    For a CUDA tensor they stay on the GPU: the host does not synchronize, and each replay of a CUDA graph has its own.

    Args:
        key: two int64: the seed of the run and the layer, and the number of steps done.
    """
    made = _OPERATOR(x, key, count)
    return made if isinstance(made, list) else made.unbind()


def _eager(x: Tensor, key: Tensor, count: int) -> list[int] | Tensor:
    if here(x) and (found := cast.run_seeds(x.detach(), key, count, steps(x))) is not None:
        return found
    if x.is_cuda:
        return by_torch(x, key, count)
    if hasattr(x, "fake_mode"):  # no values to hash
        return [1] * count
    return [number & (1 << 64) - 1 for number in by_torch(x, key, count).tolist()]


@torch.no_grad()
def by_torch(x: Tensor, key: Tensor, count: int) -> Tensor:
    """`seeds` as int64 (count): SplitMix64's outputs from a state that is a sum over the sample's bits.

    Source: Steele, Lea and Flood 2014, as `quant.derive_seed`.
    """
    key = key.to(x.device)
    bits = _sample(x.detach()).contiguous().view(_BITS[x.itemsize]).flatten().long()
    places = torch.arange(max(len(bits), count) + 1, dtype=torch.int64, device=x.device)
    state = (bits * (places[: len(bits)] * _signed(_PLACE) | 1)).sum() + key[0] + key[1] * _signed(_STEP)
    numbers = state + places[1 : count + 1] * _signed(_GOLDEN)
    for shift, factor in _MIXERS:
        numbers = (numbers ^ _shifted(numbers, shift)) * _signed(factor)
    return numbers ^ _shifted(numbers, 31)


def _sample(x: Tensor) -> Tensor:
    """About a thousand elements from all over a tensor of any strides: every n-th along each dimension. n is odd and
    near 0.618 times the even spacing, no simple fraction of the size, so that they fall at different positions of the
    sequences of a batch."""
    return x[tuple(slice(None, None, step) for step in steps(x))]


def steps(x: Tensor) -> list[int]:
    """The step along each dimension at which `_sample` takes elements."""
    most = _SAMPLES ** (1 / max(x.dim(), 1))
    return [max(1, int(0.618 * size / most) | 1) for size in x.shape]


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """`numbers` shifted right as unsigned integers."""
    return numbers >> by & (1 << 64 - by) - 1


def _signed(number: int) -> int:
    return number - (number >> 63 << 64)


def seed_in(rounding: str, seed: Tensor | None, device: torch.device) -> Seed | None:
    """The seed of a graph's operator as a kernel on `device` takes it; drawn here where it is None, as a traced graph
    cannot."""
    if seed is None:
        return draw_seed(None, device) if rounding == "stochastic" else None
    return seed if seed.is_cuda else int(seed) & (1 << 64) - 1


_OPERATOR = Operator(
    "seeds(Tensor x, Tensor key, int count) -> Tensor",
    _eager,
    by_torch,
    like=lambda x, key, count: x.new_empty(count, dtype=torch.int64),
)
