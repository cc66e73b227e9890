"""The range of a tensor, and the effect of a cast; observation of every tensor of a forward and a backward."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from halfstep.bits.what_if import Limits
from halfstep.tracking import ExponentHistogram
from halfstep.tracking.nonfinite import tensors_in


MASK = torch.finfo(torch.float32).max  # attention masks add minus this, or minus infinity; these are not activations


@dataclass(frozen=True)
class Site:
    """A tensor of a model: its module, and its role in that module."""

    module: str
    """The module's path; empty for the model itself."""
    kind: str
    """The class of the module."""
    role: str
    """`input`, `output`, `product`, `attention logits`, a parameter's name; `gradient of ...` these."""
    backward: bool = False

    def __str__(self) -> str:
        return f"{self.role} of {self.module or 'the model'} ({self.kind})"


@dataclass(frozen=True)
class Counts:
    """Exact counts over the values of tensors. NaN, and the values of attention masks, do not count."""

    largest: float = 0.0
    """The largest magnitude; infinite or NaN if a value is."""
    values: int = 0
    nonzero: int = 0
    beyond: int = 0
    """The number of values that overflow, or saturate."""
    subnormal: int = 0
    vanished: int = 0
    """The number of non-zero values that become zero."""
    magnitude: float = 0.0
    """The sum of all magnitudes."""
    lost: float = 0.0
    """The part of `magnitude` that vanishing and saturating remove."""

    def __add__(self, other: "Counts") -> "Counts":
        largest = math.nan if math.nan in (self.largest, other.largest) else max(self.largest, other.largest)
        return Counts(largest, *(getattr(self, name) + getattr(other, name) for name in _ADDED))


_ADDED = ("values", "nonzero", "beyond", "subnormal", "vanished", "magnitude", "lost")


def count(x: Tensor, limits: Limits) -> Counts:
    """The counts of one floating-point tensor, computed in float32."""
    size = x.detach().float().reshape(-1)
    if size.numel() == 0:
        return Counts()
    low, high = map(float, torch.aminmax(size))
    if low <= -MASK:
        size = size[size > -MASK]
        low = float(size.min()) if size.numel() else 0.0
    size = size.abs()
    largest = math.nan if math.isnan(low + high) else max(-low, high) if size.numel() else 0.0
    zeros = size.numel() - int(torch.count_nonzero(size))
    gone = limits.zeroed(size, zeros)
    small = limits.subnormal(size, zeros + gone)
    beyond = limits.over(size) if not largest < limits.beyond else 0
    magnitude = float(size.sum())
    if math.isinf(magnitude):
        magnitude = float(size.sum(dtype=torch.float64))
    lost = float(size[size <= limits.vanishing].sum(dtype=torch.float64)) if gone else 0.0
    if beyond and not limits.overflows:
        lost += float((size[size >= limits.beyond].double() - limits.format.max).sum())
    return Counts(largest, size.numel(), size.numel() - zeros, beyond, small, gone, magnitude, lost)


@dataclass(frozen=True)
class Range:
    """The range of one tensor of the model over all batches, in float32."""

    site: Site
    order: int
    """The index in the order of execution, by its first occurrence."""
    counts: Counts
    limits: Limits
    block: bool = False
    """Whether it is the input or output of a repeated block: the residual stream."""

    @property
    def share_beyond(self) -> float:
        """The share of values that overflow or saturate."""
        return self.counts.beyond / self.counts.values if self.counts.values else 0.0

    @property
    def share_subnormal(self) -> float:
        """The share of the non-zero values that become subnormal."""
        return self.counts.subnormal / self.counts.nonzero if self.counts.nonzero else 0.0

    @property
    def share_vanished(self) -> float:
        """The share of the non-zero values that become zero."""
        return self.counts.vanished / self.counts.nonzero if self.counts.nonzero else 0.0

    @property
    def lost(self) -> float:
        """The share of the sum of magnitudes that vanishing and saturating remove."""
        return self.counts.lost / self.counts.magnitude if self.counts.magnitude else 0.0

    @property
    def headroom(self) -> float:
        """Bits between the largest magnitude and the largest value of the format; negative if the magnitude is
        larger."""
        return math.log2(self.limits.format.max / self.counts.largest) if self.counts.largest else math.inf

    def to_dict(self) -> dict[str, Any]:
        """The range as JSON data."""
        return {
            **asdict(self.site),
            "residual": self.block,
            "largest": self.counts.largest,
            "headroom_bits": number(self.headroom),
            "beyond": self.share_beyond,
            "subnormal": self.share_subnormal,
            "vanished": self.share_vanished,
            "lost": self.lost,
        }


def number(value: float) -> float | None:
    """The value; None if it is infinite or NaN, which JSON cannot express."""
    return value if math.isfinite(value) else None


FLOOR = 2.0**-40
"""Tensors of gradients that are all smaller do not count as vanishing: Adam, whose epsilon is 1e-8, hardly changes a
weight by them."""


@dataclass(frozen=True)
class Window:
    """Loss scales, powers of two, from `smallest` to `largest`; empty if smallest > largest."""

    smallest: float
    """The smallest loss scale at which little of each gradient vanishes; 0 if nothing ever does."""
    largest: float
    """The largest loss scale at which no gradient overflows; infinite if all gradients are zero."""
    first_to_vanish: Site | None = None
    """The tensor whose gradient determines `smallest`."""
    first_to_overflow: Site | None = None
    """The tensor whose gradient overflows beyond `largest`."""

    @property
    def empty(self) -> bool:
        """Whether no loss scale works."""
        return self.smallest > self.largest

    def holds(self, scale: float) -> bool:
        """Whether that loss scale lies in the window."""
        return self.smallest <= scale <= self.largest


def window(
    gradients: Iterable[Range], histograms: Mapping[Site, ExponentHistogram], limits: Limits, tolerance: float
) -> Window:
    """The window over all gradients, which are unscaled.

    The largest scale is exact, from the largest magnitudes. The smallest is computed from histograms of exponents, a
    bin counting as 1.5 * 2^e: at it, the vanishing values are at most `tolerance` of each gradient's sum of magnitudes.
    Gradients below `FLOOR` do not count for it.
    """
    largest, over = math.inf, None
    for found in gradients:
        if found.counts.largest:
            one = _largest(found.counts.largest, limits.beyond), found.site
            largest, over = min((largest, over), one, key=lambda pair: pair[0])
    smallest, under = 0.0, None
    for site, histogram in histograms.items():
        scale = _smallest(histogram, limits, tolerance)
        smallest, under = max((smallest, under), (scale, site), key=lambda pair: pair[0])
    return Window(smallest, largest, under, over)


def _largest(magnitude: float, beyond: float) -> float:
    """The largest power of two whose product with the magnitude stays below `beyond`."""
    mantissa, exponent = math.frexp(magnitude)
    end, top = math.frexp(beyond)  # m 2^e 2^k < b 2^t: k = t - e if m < b, else one less
    return 2.0 ** (top - exponent - (mantissa >= end))


def _smallest(histogram: ExponentHistogram, limits: Limits, tolerance: float) -> float:
    """The smallest power of two at which the vanishing bins contain at most that share of the sum of magnitudes."""
    if limits.vanishing < 0 or max(histogram.counts, default=-math.inf) < math.log2(FLOOR):
        return 0.0
    lowest = min(histogram.counts)
    masses = {exponent: n * 2.0 ** (exponent - lowest) for exponent, n in sorted(histogram.counts.items())}
    allowed, below = tolerance * sum(masses.values()), 0.0
    tie = math.frexp(limits.format.smallest / 2)[1] - 1
    for exponent, mass in masses.items():
        below += mass
        if below > allowed:  # this bin must not vanish: bin e vanishes at scale 2^k if 2^(e + k) < smallest / 2
            return 2.0 ** (tie - exponent)
    return 0.0


See = Callable[[Site, Tensor], None]

_aten = torch.ops.aten
_PRODUCTS = {_aten.bmm.default, _aten.baddbmm.default, _aten.mm.default, _aten.addmm.default}
_FUSED = {
    getattr(_aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(_aten, name)
}
_CHUNK = 1 << 22  # attention logits computed at a time


@contextmanager
def observed(model: nn.Module, see: See) -> Iterator[None]:
    """A context in which `see(site, tensor)` is called with every floating-point tensor of a pass, when it is computed.

    These are the inputs and outputs of each module, the matmuls in a module's own code, the logits of fused attention
    (recomputed from queries and keys, in their dtype), and the gradients of all of these in the backward. Nothing stays
    on the model. Keyword inputs count only if they require a gradient: the others are masks and positions.
    """
    eyes = _Observer(model, see)
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(eyes.before, path), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(eyes.after, path), always_call=True))
        hooks.enter_context(_MatmulMode(eyes))
        yield


class _Observer:
    """Keeps track of the running module, and of what to observe when a gradient arrives."""

    def __init__(self, model: nn.Module, see: See) -> None:
        self.see = see
        self._kinds = {path: type(module).__name__ for path, module in model.named_modules()}
        # The matmul of these is the module's output.
        self._shown = {
            path for path, module in model.named_modules() if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
        }
        self._running: list[str] = []
        self._arrived: str | None = None
        """In the backward: the module whose gradient arrived last."""
        self._waiting: Any = WeakIdKeyDictionary()

    def before(self, path: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._running.append(path)
        for tensor in [*tensors_in(args), *(t for t in tensors_in(kwargs) if t.requires_grad)]:
            self._look(path, "input", tensor)

    def after(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        for tensor in tensors_in(output):
            self._look(path, "output", tensor)

    def inside(self) -> tuple[str, bool] | None:
        """The module whose code computes the present matmul, and whether in the backward; None if it is reported
        elsewhere."""
        path = self._running[-1] if self._running else self._arrived
        return None if path is None or path in self._shown else (path, not self._running)

    def site(self, path: str, role: str, backward: bool) -> Site:
        return Site(path, self._kinds[path], f"gradient of the {role}" if backward else role, backward)

    def _look(self, path: str, role: str, tensor: Tensor) -> None:
        if not tensor.is_floating_point():
            return
        self.see(self.site(path, role, False), tensor)
        if not tensor.requires_grad or tensor.is_leaf or tensor.dim() == 0:  # a loss is a float32 number
            return
        version, sites = self._waiting.get(tensor, (None, []))
        if version != tensor._version:  # else a hook for its gradient is already registered, for another module
            sites = []
            self._waiting[tensor] = tensor._version, sites
            tensor.register_hook(lambda grad: self._arrive(sites, grad))  # type: ignore[no-untyped-call]
        sites.append((path, role))

    def _arrive(self, sites: list[tuple[str, str]], grad: Tensor) -> None:
        made = [path for path, role in sites if role == "output"]
        self._arrived = made[0] if made else sites[0][0].rpartition(".")[0]
        for path, role in reversed(sites):  # the modules that read the tensor computed its gradient, so they come first
            self.see(self.site(path, role, True), grad)


class _MatmulMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that observes the matmuls of functional code, without changing them."""

    def __init__(self, eyes: _Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._eyes = eyes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS or func in _FUSED:
            place = self._eyes.inside()
            if place is not None and func in _PRODUCTS and result.is_floating_point():
                self._eyes.see(self._eyes.site(place[0], "product", place[1]), result)
            elif place is not None and func in _FUSED:
                site = self._eyes.site(place[0], "attention logits", False)
                for logits in _logits(args[0], args[1], (kwargs or {}).get("scale")):
                    self._eyes.see(site, logits)
        return result


def _logits(query: Tensor, key: Tensor, scale: float | None) -> Iterator[Tensor]:
    """q k^T times scale (1 / sqrt(width) if None), one piece at a time, computed in float32 and rounded to q's dtype.

    query is (batch, heads, length, width), key the same with as many heads or fewer; before any mask.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if query.shape[-3] != key.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    queries, keys = query.detach().flatten(0, -3), key.detach().flatten(0, -3)
    step = max(1, _CHUNK // max(1, queries.shape[-2] * keys.shape[-2]))
    for start in range(0, len(queries), step):
        q, k = queries[start : start + step].float(), keys[start : start + step].float()
        yield (torch.bmm(q, k.transpose(-1, -2)) * scale).to(query.dtype)
