"""What a scale rule does: from the numbers of a tile to the scale that is stored, and from that to a multiplier."""

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
"""The tensors a rule keeps beside the codes; `scale` is always one of them, with an entry a tile."""


STATES = "_halfstep_scaling_"
"""How the names of the buffers begin in which a module has the states of its scalings."""
_MOST = 2**20
"""The largest number that an option of a rule may be: of steps, or of powers of two."""


@dataclass(frozen=True)
class Scaling(ABC):
    """A rule for the scales of tiles.

    A tile with an infinity or NaN gets a scale that is NaN, and with it every element of that tile; a multiplier of 0
    stands for a tile of zeros.
    """

    name: str

    exact: ClassVar[bool] = False
    """Whether multipliers are powers of two: then an element is rounded from the exact quotient x / multiplier, and
    otherwise from the quotient in float32 (in float64 for float64 input)."""
    multiplies: ClassVar[bool] = False
    """Whether elements are multiplied by the factor that `scale` returns, the stored scale being its reciprocal, and
    not divided by the scale: the two differ in the last bit."""
    holds: ClassVar[str] = "float32"
    """What an entry of the stored scales is: a format's name."""
    reads: ClassVar[bool] = True
    """Whether the scale depends on the tensor at all."""
    quotient: ClassVar[bool] = False
    """Whether the scale is a tile's amax / max in float32, and kept so."""
    reciprocal: ClassVar[bool] = False
    """Whether elements are multiplied by max / amax of their tile in float32 (`Current`), the scale being 1 / that."""
    linear: ClassVar[bool] = True
    """Whether values are elements times the multiplier of their tile: not so of a `NonlinearScaling`."""
    narrow: ClassVar[bool] = False
    """Whether the scale is a tile's amax / max in float32, rounded to bfloat16 and kept so."""
    two_level: ClassVar[bool] = False
    """Whether the scales are amax / max / tensor_scale in E4M3, with one `tensor_scale` apart: a `TwoLevel`."""
    inner: ClassVar["Scaling | None"] = None
    """A rule of powers of two, where this one is that rule for `part` of the numbers: products take the values that it
    leaves, and 1 / part as a scale of the whole tensor."""

    @property
    def part(self) -> float:
        """What `inner` takes of the numbers: a property, since traced graphs take a class's floats for unknowns."""
        return 1.0

    def __init_subclass__(cls) -> None:
        """Reset what kernels read of `scale` in a class that overrides it, unless the class sets it too."""
        super().__init_subclass__()
        if "scale" in vars(cls):
            for name in {"quotient", "narrow", "reciprocal", "two_level", "power"} - vars(cls).keys():
                setattr(cls, name, getattr(Scaling, name))

    def __post_init__(self) -> None:
        for field in fields(self):
            value, usual = getattr(self, field.name), field.default
            if type(usual) is int and (type(value) is not int or abs(value) > _MOST):
                raise QuantizationError(
                    f"scale rule {self.name} with {field.name} = {value!r}; expected a whole number, such as {usual}"
                )

    def __str__(self) -> str:
        """The name, and the options that are not the usual ones: `rceil margin=3`."""
        usual = {field.name: field.default for field in fields(self)}
        return self.name + "".join(f" {key}={value}" for key, value in self.options.items() if value != usual[key])

    @property
    def options(self) -> dict[str, Any]:
        """What the rule takes beside its name, such as a history or a margin: its fields whose default is a number or
        a word."""
        kept = (field.name for field in fields(self) if isinstance(field.default, (int, float, str)))
        return {name: getattr(self, name) for name in kept}

    @cached_property
    def text(self) -> str:
        """Name and options in JSON, by which a traced graph knows the rule (`scaling.from_text`)."""
        return json.dumps({"name": self.name, **self.options})

    @abstractmethod
    def scale(self, x: Tensor, tile: Tile, element: Format) -> tuple[Stored, Tensor]:
        """What is stored for a (rows, columns) matrix, and what the elements of each tile are divided by (multiplied,
        where the rule `multiplies`)."""

    def multiplier(self, stored: Stored, element: Format) -> Tensor:
        """What the elements of each tile are multiplied by: (tile rows, tile columns), float32."""
        return stored["scale"]

    def factor(self, amax: Tensor, element: Format) -> Tensor | None:
        """What elements are multiplied by before they are rounded, given the amax of their tile, in float32; None for
        a rule that needs more than the amax. For products, which take the scale of a whole tensor last."""
        return None

    def power(self, element: Format) -> tuple[float, int] | None:
        """(carry, exponent) of a rule whose scale, in E8M0, follows from a tile's amax = f * 2^e, f in [1/2, 1): it is
        2^(e - exponent), and twice that where f >= carry. None for other rules."""
        return None

    def layout(self, grid: tuple[int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of every tensor stored for that grid of tiles."""
        return {"scale": (torch.float32, grid)}


class NonlinearScaling(Scaling):
    """A rule whose values are not multiples of their elements: it turns one into the other itself, both ways.

    It serves what is kept and read back as values. The operands of products are elements times a scale, so no product
    takes it. A NaN in the stored scale still says that a tile is lost.
    """

    linear = False

    @abstractmethod
    def elements(self, x: Tensor, stored: Stored, tile: Tile, element: Format) -> Tensor:
        """What is rounded to the element format, of a (rows, columns) matrix; 0 in lost tiles."""

    @abstractmethod
    def values(self, elements: Tensor, stored: Stored, tile: Tile, element: Format) -> Tensor:
        """The numbers that rounded elements, of that shape, stand for; NaN in lost tiles."""

    def multiplier(self, stored: Stored, element: Format) -> Tensor:
        raise QuantizationError(
            f"the values of scale rule {self.name} are not its elements times a scale: read them with dequantize()"
        )


class StatefulScaling(Scaling):
    """A rule whose scales depend on earlier steps, with one state an operand.

    A state is one float32 tensor: first the factor in use, 0 where the tensor's own amax decides; then the amax of the
    step that runs, then what the rule likes. Forward and backward may only raise that amax; `advance` alone moves a
    state on. An amax that is not finite stays so until the step ends (infinite, after ranks have agreed), and no rule
    lets it into what it keeps.
    """

    first: ClassVar[Scaling | None] = None
    """The rule of a tensor's own amax whose factor it has where the state's is 0, if one has."""

    def waits(self, state: Tensor) -> bool:
        """Whether `in_use` needs the tensor's own amax; True where that cannot be told from the state."""
        return False

    def in_use(self, state: Tensor, amax: Tensor | None, element: Format) -> Tensor:
        """What a tensor of that amax is multiplied by before it is rounded, a float32 scalar of its own."""
        return state[0].clone()

    @abstractmethod
    def init(self, device: torch.device | str | None = None) -> Tensor:
        """The state before the first step."""

    @abstractmethod
    def advance(self, states: Tensor, element: Format) -> None:
        """End an optimizer step, in place. `states` is one, or one a row."""

    def after(self, amax: Tensor, element: Format) -> Tensor:
        """The state after one step of that amax alone: just-in-time scaling, where there is no history."""
        state = self.init(amax.device)
        self.record(state, amax)
        self.advance(state, element)
        return state

    def record(self, state: Tensor, amax: Tensor) -> None:
        """Raise the amax of the step that runs."""
        state[1].copy_(torch.maximum(state[1], amax))


def check_power(rule: Scaling, option: str) -> None:
    """Refuse a power of two that float32 does not hold.

    Raises:
        QuantizationError: the option is one.
    """
    power = getattr(rule, option)
    if not -126 <= power <= 126:
        raise QuantizationError(
            f"scale rule {rule.name} with {option} = {power}; expected a power of two from -126 to 126"
        )


def finite(amax: Tensor) -> Tensor:
    """`amax` with NaN for every tile whose maximum is not finite."""
    return torch.where(amax.isfinite(), amax, torch.nan)


def over(amax: Tensor, largest: float) -> Tensor:
    """amax / largest, rounded once on every device: by a Python number, CUDA multiplies by its reciprocal."""
    return amax / torch.full_like(amax, largest)
