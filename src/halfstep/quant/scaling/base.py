"""The interface of scaling rules: from a tile's elements to the stored scale, and from that to a multiplier."""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.errors import QuantizationError
from halfstep.formats import Format
from halfstep.quant.tile import Tile


Stored = dict[str, Tensor]
"""The tensors that a rule stores besides the codes; `scale`, with one entry per tile, is always among them."""


STATES = "_halfstep_scaling_"
"""The prefix of the names of the buffers in which a module keeps the states of its scalings."""
_MOST = 2**20
"""The largest integer option of a rule: a number of steps, or a power of two."""


@dataclass(frozen=True)
class Scaling(ABC):
    """A rule for the scales of tiles.

    A tile with an infinity or NaN gets a scale of NaN, which makes all its elements NaN; a multiplier of 0 means a tile
    of zeros.
    """

    name: str

    exact: ClassVar[bool] = False
    """Whether multipliers are powers of two: then an element is rounded from the exact quotient x / multiplier, and
    otherwise from the quotient in float32 (in float64 for float64 input)."""
    multiplies: ClassVar[bool] = False
    """Whether elements are multiplied by the factor that `scale` returns, the stored scale being its reciprocal,
    instead of divided by the scale: the two differ in the last bit."""
    holds: ClassVar[str] = "float32"
    """The format of the stored scales, by name."""
    reads: ClassVar[bool] = True
    """Whether the scale depends on the tensor at all."""
    quotient: ClassVar[bool] = False
    """Whether the scale is a tile's amax / max in float32, stored as that."""
    reciprocal: ClassVar[bool] = False
    """Whether elements are multiplied by max / amax of their tile in float32 (`Current`), and the scale is 1 / that."""
    linear: ClassVar[bool] = True
    """Whether values are elements times the multiplier of their tile: false for a `NonlinearScaling`."""
    narrow: ClassVar[bool] = False
    """Whether the scale is a tile's amax / max in float32, rounded to bfloat16 and stored as that."""
    two_level: ClassVar[bool] = False
    """Whether the scales are amax / max / tensor_scale in E4M3, with one `tensor_scale` for the tensor: a
    `TwoLevel`."""
    inner: ClassVar["Scaling | None"] = None
    """A power-of-two rule to which this one is equal on x times `part`: matmuls take the values that it gives, and 1 /
    part as a scale of the whole tensor."""

    @property
    def part(self) -> float:
        """The factor on x before `inner`; a property, since traced graphs make symbols of a class's floats."""
        return 1.0

    def __init_subclass__(cls) -> None:
        """Reset the attributes that tell kernels how `scale` works in a class that overrides it, unless the class sets
        them too."""
        super().__init_subclass__()
        if "scale" in vars(cls):
            for name in {"quotient", "narrow", "reciprocal", "two_level", "power"} - vars(cls).keys():
                setattr(cls, name, getattr(Scaling, name))

    def __post_init__(self) -> None:
        for field in fields(self):
            value, usual = getattr(self, field.name), field.default
            if type(usual) is int and (type(value) is not int or abs(value) > _MOST):
                raise QuantizationError(
                    f"scale rule {self.name} with {field.name} = {value!r}; expected an integer, such as {usual}"
                )

    def __str__(self) -> str:
        """The name, and the options that differ from their defaults: `rceil margin=3`."""
        usual = {field.name: field.default for field in fields(self)}
        return self.name + "".join(f" {key}={value}" for key, value in self.options.items() if value != usual[key])

    @property
    def options(self) -> dict[str, Any]:
        """The rule's options, such as a history or a margin: its fields whose default is a number or a string."""
        kept = (field.name for field in fields(self) if isinstance(field.default, (int, float, str)))
        return {name: getattr(self, name) for name in kept}

    @cached_property
    def text(self) -> str:
        """Name and options in JSON, from which a traced graph makes the rule (`scaling.from_text`)."""
        return json.dumps({"name": self.name, **self.options})

    @abstractmethod
    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        """The tensors to store for a (rows, columns) matrix, and the divisor of each tile's elements (the factor, where
        the rule `multiplies`)."""

    def multiplier(self, stored: Stored, element: Format) -> Tensor:
        """The factor from the elements of each tile to values: (tile rows, tile columns), float32."""
        return stored["scale"]

    def factor(self, amax: Tensor, element: Format) -> Tensor | None:
        """The factor on elements before they are rounded, given the amax of their tile, in float32; None for a rule
        that needs more than the amax. For matmuls, which apply the scale of a whole tensor last."""
        return None

    def power(self, element: Format) -> tuple[float, int] | None:
        """(carry, exponent) of a rule whose scale, in E8M0, depends on a tile's amax = f * 2^e, f in [1/2, 1): it is
        2^(e - exponent), and twice that where f >= carry. None for other rules."""
        return None

    def layout(self, grid: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of every tensor stored for that grid of tiles."""
        return {"scale": (torch.float32, grid)}


class NonlinearScaling(Scaling):
    """A rule whose values are not multiples of their elements: it converts between them itself, both ways.

    It is for tensors that are stored and read back as values. Operands of matmuls are elements times a scale, so no
    matmul takes it. A NaN in the stored scale still makes the whole tile NaN.
    """

    linear = False

    @abstractmethod
    def elements(self, x: Tensor, stored: Stored, tile: Tile, element: Format) -> Tensor:
        """The elements of a (rows, columns) matrix, to be rounded to the element format; 0 in tiles whose scale is
        NaN."""

    @abstractmethod
    def values(self, elements: Tensor, stored: Stored, tile: Tile, element: Format) -> Tensor:
        """The values of rounded elements, in their shape; NaN in tiles whose scale is NaN."""

    def multiplier(self, stored: Stored, element: Format) -> Tensor:
        raise QuantizationError(
            f"the values of scale rule {self.name} are not its elements times a scale: read them with dequantize()"
        )


class StatefulScaling(Scaling):
    """A rule whose scales depend on earlier steps, with one state per operand.

    A state is one float32 tensor: first the factor in use, 0 where the tensor's own amax decides; then the amax of the
    current step; then whatever the rule needs. Forward and backward may only raise that amax; only `advance` changes
    the rest. An amax that is not finite stays so until the step ends (infinite, after ranks have agreed), and no rule
    lets it into its history.
    """

    first: ClassVar[Scaling | None] = None
    """The rule, if any, that computes the factor from a tensor's own amax where the state's factor is 0."""

    def waits(self, state: Tensor) -> bool:
        """Whether `in_use` needs the tensor's own amax; True where the state does not tell without synchronizing."""
        return False

    def in_use(self, state: Tensor, amax: Tensor | None, element: Format) -> Tensor:
        """The factor on a tensor with that amax before it is rounded, as a new float32 scalar."""
        return state[0].clone()

    @abstractmethod
    def init(self, device: torch.device | str | None = None) -> Tensor:
        """The state before the first step."""

    @abstractmethod
    def advance(self, states: Tensor, element: Format) -> None:
        """End an optimizer step, in place. `states` is one state, or one per row."""

    def after(self, amax: Tensor, element: Format) -> Tensor:
        """The state after one step with that amax alone: just-in-time scaling, for use without a history."""
        state = self.init(amax.device)
        self.record(state, amax)
        self.advance(state, element)
        return state

    def record(self, state: Tensor, amax: Tensor) -> None:
        """Raise the amax of the current step."""
        state[1].copy_(torch.maximum(state[1], amax))


def check_power(rule: Scaling, option: str) -> None:
    """Check that 2 to the power of an option is a normal float32.

    Raises:
        QuantizationError: it is not.
    """
    power = getattr(rule, option)
    if not -126 <= power <= 126:
        raise QuantizationError(
            f"scale rule {rule.name} with {option} = {power}; expected a power of two from -126 to 126"
        )


def finite(amax: Tensor) -> Tensor:
    """`amax` with NaN for every tile whose amax is not finite."""
    return torch.where(amax.isfinite(), amax, torch.nan)


def over(amax: Tensor, largest: float) -> Tensor:
    """amax / largest, correctly rounded on every device: CUDA divides by a Python float by multiplying with its
    reciprocal."""
    return amax / torch.full_like(amax, largest)
