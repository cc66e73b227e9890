"""Functions of tensors that torch.compile leaves whole, among them the largest magnitude of a tensor, and seeds.

Traced, a call is one node of the graph. Modes that watch operators are told of tensors without values, such as torch's
FakeTensors, where no kernel can run.

Making the operands of a product writes in place, to scaling states too, so that is not seen, and done again in a
backward pass whatever the policy says; the product itself is seen, and kept where the policy says so.

The largest magnitude of a tensor, and seeds that follow from a key and from its numbers, come from a kernel where one
supports the call, else from torch; and from an operator under torch.compile.
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
    """`eager`, and under torch.compile the operator `halfstep::NAME`, which runs `inside` when the graph runs.

    Args:
        schema: torch's, such as `round(Tensor x, Tensor(a!) out, str key) -> ()`. Formats and rules travel as text.
        eager: what is called where nothing is traced.
        inside: what the operator runs; `eager` where it takes the same arguments.
        terms: makes the operator's arguments of `eager`'s.
        like: of an operator with a result, makes a tensor of the result's shape and dtype without values.
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
        """The operator, whether torch says that it traces or not."""
        return self._node(*(arguments if self._terms is None else self._terms(*arguments)))


def _nothing(*arguments: Any) -> None:
    """An operator that writes to what it was given has no result."""


# ---- tensors without values ------------------------------------------------------------------------------------------

_LIBRARY.define("follow(Tensor x, Tensor(a!) out) -> Tensor(a!)")
_LIBRARY.impl("follow", lambda x, out: out, "CompositeExplicitAutograd")
FOLLOW = torch.ops.halfstep.follow.default
"""The operator by which `blank` says what follows from what."""


def blank(x: Tensor, *outs: Tensor) -> bool:
    """Whether x has no values: then there is nothing to compute, and modes that watch operators see that `outs`
    follow from x."""
    if not hasattr(x, "fake_mode"):
        return False
    for out in outs:
        FOLLOW(x, out)
    return True


# ---- selective activation checkpointing ------------------------------------------------------------------------------

_KEEPERS = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode
_NOTHING = nullcontext()


def _keepers() -> Sequence[Any]:
    """The modes that may keep the operators that run now: none while a graph is traced."""
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return ()
    return [mode for mode in dispatch._get_current_dispatch_mode_stack() if isinstance(mode, _KEEPERS)]


def unseen() -> AbstractContextManager[Any]:
    """Within it no operator is kept."""
    keepers = _keepers()
    seen = keepers and keepers[-1] is dispatch._get_current_dispatch_mode()
    return dispatch._pop_mode_temporarily() if seen else _NOTHING


def times(x: Tensor, factor: Tensor | float) -> Tensor:
    """x, to which nothing else refers, times a factor: in its own memory, unless what gave it is kept."""
    return x * factor if _keepers() else x.mul_(factor)


def plus(x: Tensor, y: Tensor) -> Tensor:
    """The same of a sum."""
    return x + y if _keepers() else x.add_(y)


# ---- the largest magnitude -------------------------------------------------------------------------------------------


def amax_of(x: Tensor, unless: Tensor | None = None, found: Tensor | None = None) -> Tensor:
    """max |x|, a float32 scalar: 0 for an empty tensor, NaN where there is one.

    Args:
        unless: where that float32 scalar is not 0, max |x| is not needed: a GPU, and a traced graph, read no x for it.
        found: as `kernels.gpu.amax.run` takes it, which is all that does.
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
    low, high = torch.aminmax(x.detach())  # one pass, at the speed of memory; abs().amax() would be two
    return torch.maximum(-low, high).float()


def _amax(x: Tensor, unless: Tensor, out: Tensor) -> None:
    asked = x.is_cuda or bool(unless == 0)  # a GPU tells its kernel alone
    out.copy_(amax_of(x.contiguous(), unless) if asked else torch.zeros((), dtype=torch.float32, device="cpu"))


_AMAX = Operator(
    "amax(Tensor x, Tensor unless, Tensor(a!) out) -> ()", lambda x, unless, out: out.copy_(_by_torch(x)), _amax
)


# ---- seeds -----------------------------------------------------------------------------------------------------------

_SAMPLES = 1024
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN, _STEP, _PLACE = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xAF251AF3B0F025B5  # odd, and else at random
_MIXERS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)


def seeds(x: Tensor, key: Tensor, count: int) -> Sequence[Seed]:
    """`count` seeds of 64 bits for what is drawn of a tensor: a hash of the key and of a sample of its numbers.

    In a GPU's memory for a tensor there: the host waits for nothing, and the replays of a CUDA graph have their own.

    Args:
        key: two int64: the seed of the run and the layer, and how many steps were made.
    """
    made = _OPERATOR(x, key, count)
    return made if isinstance(made, list) else made.unbind()


def _eager(x: Tensor, key: Tensor, count: int) -> list[int] | Tensor:
    if here(x) and (found := cast.run_seeds(x.detach(), key, count, steps(x))) is not None:
        return found
    if x.is_cuda:
        return by_torch(x, key, count)
    if hasattr(x, "fake_mode"):  # which has no values
        return [1] * count
    return [number & (1 << 64) - 1 for number in by_torch(x, key, count).tolist()]


@torch.no_grad()
def by_torch(x: Tensor, key: Tensor, count: int) -> Tensor:
    """int64 (count). The numbers of the generator SplitMix64 from a state that is a sum over the sample's bits.

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
    """About a thousand numbers from all over a tensor, of any strides: along each dimension every n-th one; n is odd
    and no simple part of the dimension, so that they lie at many places of the sequences that a batch is made of."""
    return x[tuple(slice(None, None, step) for step in steps(x))]


def steps(x: Tensor) -> list[int]:
    """Which of the numbers along each dimension are taken."""
    most = _SAMPLES ** (1 / max(x.dim(), 1))
    return [max(1, int(0.618 * size / most) | 1) for size in x.shape]


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """Shifted right as unsigned numbers."""
    return numbers >> by & (1 << 64 - by) - 1


def _signed(number: int) -> int:
    return number - (number >> 63 << 64)


def seed_in(rounding: str, seed: Tensor | None, device: torch.device) -> Seed | None:
    """A graph's seed as a kernel there takes it; drawn here where none was given, which a traced graph cannot do."""
    if seed is None:
        return draw_seed(None, device) if rounding == "stochastic" else None
    return seed if seed.is_cuda else int(seed) & (1 << 64) - 1


_OPERATOR = Operator(
    "seeds(Tensor x, Tensor key, int count) -> Tensor",
    _eager,
    by_torch,
    like=lambda x, key, count: x.new_empty(count, dtype=torch.int64),
)
