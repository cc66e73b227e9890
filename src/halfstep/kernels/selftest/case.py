"""What a test of a kernel is: inputs, the kernel's result, the reference's result; and how these are compared."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.formats import Format, get


_CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32, BFLOAT16, FLOAT16 = ({str(dtype).removeprefix("torch."): dtype} for dtype in DTYPES)
"""Dtypes as subjects of tests, by name."""
ROUNDINGS = ("nearest_even", "toward_zero", "stochastic")
SEED = 0x9E3779B97F4A7C15
"""The seed for the noise of stochastic rounding."""
Run = Callable[..., Any]
"""A kernel."""
Make = Callable[[tuple[int, int], torch.dtype, Any], Tensor]
"""Makes a matrix of that shape and dtype for a quantizer."""


class Case(NamedTuple):
    """One result of a kernel, and the expected one."""

    expected: Tensor
    found: Any
    """The kernel's result; None or False where it does not support the input: then the case is skipped."""
    what: str = ""
    """The name of the result, for a kernel with several."""
    given: Tensor | None = None
    """The input, if there is one result per element."""


Cases = Iterator[Case]


class KernelTest(NamedTuple):
    """A kernel on one format (or other subject)."""

    kernel: str
    format: str
    make: Callable[..., Cases]
    """Makes the cases for a device and a point."""
    points: tuple[tuple[Any, ...], ...] = ((),)
    """Dtypes, shapes, roundings: the arguments of `make` after the device."""

    def cases(self, device: torch.device) -> Cases:
        """All cases that the kernel supports, with their points as text. On a CPU, Triton kernels need its
        interpreter."""
        for point in self.points:
            for case in self.make(device, *point):
                if isinstance(case.found, Tensor):
                    yield case._replace(
                        what=", ".join(filter(None, [_text(one) for one in (*point, case.what) if one is not None]))
                    )


@dataclass(frozen=True)
class Outcome:
    """The result for one kernel on one format: how many elements were compared, and where the first difference is."""

    kernel: str
    format: str
    compared: int
    difference: str | None = None

    @property
    def passed(self) -> bool:
        """Whether every bit equals the reference's."""
        return self.difference is None


def kernel_tests(
    kernel: str,
    subjects: Mapping[str, Any],
    make: Callable[..., Cases],
    points: Iterable[tuple[Any, ...]] | Callable[[Any], Iterable[tuple[Any, ...]]] = ((),),
    /,
    **how: Any,
) -> list[KernelTest]:
    """A test for each subject (a format, a quantizer, a dtype), whose cases are `make(subject, device, *point, **how)`
    at all points; `points` may be a function of the subject."""
    of = points if callable(points) else lambda subject, fixed=tuple(points): fixed
    return [KernelTest(kernel, name, partial(make, one, **how), tuple(of(one))) for name, one in subjects.items()]


def named(get: Callable[[str], Any], *names: str) -> dict[str, Any]:
    """Subjects by name."""
    return {name: get(name) for name in names}


FP8 = named(get, "float8_e4m3fn", "float8_e5m2")


def outcome(test: KernelTest, device: torch.device = _CPU) -> Outcome:
    """Compare every case of a test. A kernel that raises, or supports no case, counts as different."""
    compared, difference = 0, None
    try:
        for case in test.cases(device):
            compared += case.expected.numel()
            difference = difference or compare(*case)
    except Exception as error:
        difference = f"raised {type(error).__name__}: {error}"
    return Outcome(test.kernel, test.format, compared, difference or (None if compared else "the kernel took no input"))


def compare(expected: Tensor, found: Tensor, what: str, given: Tensor | None = None) -> str | None:
    """Where two results first differ, as text (NaN equals NaN, -0 differs from 0); None where they are equal."""
    wide, other = (t.cpu().double() if expected.is_floating_point() else t.cpu().long() for t in (expected, found))
    same = ((wide == other) & (wide.signbit() == other.signbit())) | (wide.isnan() & other.isnan())
    if bool(same.all()):
        return None
    index = int((~same).flatten().nonzero()[0])
    of = "" if given is None else f" of {given.flatten()[index].item()!r}"
    return (
        f"{what}: element {index}{of}: {other.flatten()[index].item()!r} found, {wide.flatten()[index].item()!r} "
        f"expected; {int((~same).sum())} of {same.numel()} differ"
    )


def _text(value: Any) -> str:
    """A dtype, a shape, a word or a function."""
    whole = "x".join(map(str, value)) if type(value) is tuple else str(value)
    return getattr(value, "__name__", whole).removeprefix("torch.")


def written(run: Run, x: Tensor, out: Tensor, *given: Any) -> Any:
    """`out`, after a kernel wrote its result for x to it; False where the kernel does not support x."""
    return run(x.to(out.device), out, *given) and out


def coded(run: Run, x: Tensor, out: Tensor, *given: Any, **more: bool) -> Any:
    """`written` for a kernel that returns None where it does not support x, and False where a value has no code, or a
    code no value."""
    done = run(x.to(out.device), out, *given, **more)
    assert done is not False, "the kernel refused what has a code"
    return done and out


# ---- inputs ---------------------------------------------------------------------------------------------------------


def hard(size: int, dtype: torch.dtype = torch.float32, format: Format | None = None) -> Tensor:
    """`size` values, the hardest first: specials and subnormals, the format's values and boundaries with their
    neighbours, random bit patterns, and normally distributed values."""
    generator = torch.Generator().manual_seed(size)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, -3.4028235e38, 1.0]
    parts = [torch.tensor(special, dtype=torch.float32, device="cpu")]
    if format is not None and format.bits <= 8:
        points = torch.tensor([*format.boundaries(), *format.values()], dtype=torch.float64, device="cpu").float()
        parts += [points, *(torch.nextafter(points, scalar(to)) for to in (math.inf, -math.inf))]
    patterns = torch.randint(-(2**31), 2**31, (size // 2,), generator=generator, dtype=torch.int64, device="cpu")
    usual = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
    return torch.cat([*parts, patterns.to(torch.int32).view(torch.float32), usual])[:size].to(dtype)


def finite(size: int, dtype: torch.dtype = torch.float32, format: Format | None = None) -> Tensor:
    """`hard`, with 1 for NaN and the largest value for infinity."""
    return hard(size, dtype, format).nan_to_num(1.0)


def matrix(shape: tuple[int, int], dtype: torch.dtype, quantizer: Any = None) -> Tensor:
    """`hard` as a matrix."""
    return hard(math.prod(shape), dtype).view(shape)


def bounded(shape: tuple[int, int], dtype: torch.dtype, quantizer: Any = None, limit: float = 1e30) -> Tensor:
    """`matrix`, with 1 for values that are not finite, or so large that products with small values may not be."""
    x = matrix(shape, dtype)
    return torch.where(x.float().abs() < limit, x, 1.0)


def whole(seed: int, *shape: int, most: int = 8) -> Tensor:
    """Small integers in float32: their products have an exact sum in any order."""
    return torch.randint(
        -most, most + 1, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int64, device="cpu"
    ).float()


def scalar(number: float, device: torch.device = _CPU) -> Tensor:
    """A float32 scalar."""
    return torch.full((), number, dtype=torch.float32, device=device)


def seed_of(rounding: str) -> int | None:
    """The seed for that rounding; None where it draws no noise."""
    return SEED if rounding == "stochastic" else None


def cell(seed: int, device: torch.device) -> Tensor:
    """A seed as an int64 scalar on the device, where the replays of a CUDA graph read it."""
    return torch.full((), seed - (seed >> 63 << 64), device=device, dtype=torch.int64)
