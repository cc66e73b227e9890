"""How scales are stored in files: float32 numbers, powers of two as bytes, or E4M3 numbers beside one of float32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import LayoutError
from halfstep.ops import Quantized
from halfstep.quant import Quantizer, Scaling
from halfstep.quant.family import power_of_two


Move = Callable[[Tensor], Tensor]
"""From a grid of scales, an entry a tile, to that of larger or smaller tiles."""
Sizes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class StoredScales(ABC):
    """One way of storing scales."""

    text: str
    """What they are, in words."""
    plain: bool = False
    """Whether they hold 1, for codes without scales."""

    @abstractmethod
    def way(self, rule: Scaling) -> str | None:
        """How the rule's scales are stored so: the `same`, as the rule stores them, or in `other` numbers in which each
        is found again. None where some cannot be."""

    @abstractmethod
    def tensors(self, made: Quantized, move: Move) -> dict[str, Tensor]:
        """The tensors in the file, by name."""

    @abstractmethod
    def stored(
        self, tensors: Mapping[str, Tensor], quantizer: Quantizer, grid: tuple[int, int], move: Move, note: Any
    ) -> dict[str, Tensor]:
        """What a `Quantized` of that quantizer keeps beside its codes, from the tensors of such a grid."""

    @abstractmethod
    def layout(self, grid: tuple[int, int]) -> Sizes:
        """Name, dtype and shape of the tensors for that grid of tiles."""

    def note(self, made: Quantized) -> Any:
        """What else has to be kept to find the scales in the file again; None where nothing has."""
        return None


@dataclass(frozen=True)
class Float32(StoredScales):
    """Float32 numbers that codes are multiplied by."""

    name: str = "weight_scale"
    flat: bool = False
    """Whether there is one, in a tensor of one dimension."""

    text = "float32 numbers, one a tile"
    plain = True

    def way(self, rule: Scaling) -> str | None:
        alone = rule.linear and rule.layout((1, 1)).keys() == {"scale"}
        if not alone or not (rule.exact or rule.holds in ("float32", "bf16")):
            return None
        return "same" if rule.holds == "float32" else "other"

    def tensors(self, made: Quantized, move: Move) -> dict[str, Tensor]:
        moved = move(_grid(made))
        return {self.name: moved.view(1) if self.flat else moved}

    def stored(
        self, tensors: Mapping[str, Tensor], quantizer: Quantizer, grid: tuple[int, int], move: Move, note: Any
    ) -> dict[str, Tensor]:
        if quantizer.scales is None:
            return {}
        scale = move(tensors[self.name].view(grid))
        held = quantizer.scales.rule.layout((1, 1))["scale"][0]
        return {"scale": _exponents(scale) if held == torch.uint8 else scale.to(held)}

    def layout(self, grid: tuple[int, int]) -> Sizes:
        return {self.name: (torch.float32, (1,) if self.flat else grid)}


@dataclass(frozen=True)
class Exponents(StoredScales):
    """Powers of two 2^k as bytes k + 127 (E8M0)."""

    name: str = "weight_scale"

    text = "powers of two, one a tile"
    plain = True

    def way(self, rule: Scaling) -> str | None:
        if not rule.exact or rule.layout((1, 1)).keys() != {"scale"}:
            return None
        return "same" if rule.holds == "float8_e8m0fnu" else "other"

    def tensors(self, made: Quantized, move: Move) -> dict[str, Tensor]:
        return {self.name: move(_exponents(_grid(made)))}

    def stored(
        self, tensors: Mapping[str, Tensor], quantizer: Quantizer, grid: tuple[int, int], move: Move, note: Any
    ) -> dict[str, Tensor]:
        if quantizer.scales is None:
            return {}
        byte = move(tensors[self.name])
        held = quantizer.scales.rule.layout((1, 1))["scale"][0]
        return {"scale": byte if held == torch.uint8 else power_of_two(byte.long() - 127).float()}

    def layout(self, grid: tuple[int, int]) -> Sizes:
        return {self.name: (torch.uint8, grid)}


@dataclass(frozen=True)
class TwoLevels(StoredScales):
    """E4M3 numbers, one a tile, divided by one float32 number of the tensor, which is stored as its reciprocal."""

    text = "E4M3 numbers beside one of the tensor"

    def way(self, rule: Scaling) -> str | None:
        return "same" if rule.two_level else None

    def tensors(self, made: Quantized, move: Move) -> dict[str, Tensor]:
        _finite(made.tensors["tensor_scale"])
        bytes_ = move(made.tensors["scale"])
        if bool(((bytes_ & 127) == 127).any()):
            raise _lost()
        return {
            "weight_scale": bytes_.view(torch.float8_e4m3fn),
            "weight_global_scale": _finite(made.tensors["tensor_scale"].reciprocal()).view(1),
        }

    def stored(
        self, tensors: Mapping[str, Tensor], quantizer: Quantizer, grid: tuple[int, int], move: Move, note: Any
    ) -> dict[str, Tensor]:
        if not isinstance(note, str):
            raise LayoutError(f"the tensor's scale is noted as {note!r}; expected a hexadecimal number such as 0x1p-9")
        scale = torch.tensor(float.fromhex(note), dtype=torch.float32, device="cpu")
        stored = tensors["weight_global_scale"].view(())
        if not torch.equal(scale.reciprocal(), stored):
            raise LayoutError(
                f"weight_global_scale is {float(stored)} and the tensor's scale {float(scale)}; expected one to be the "
                "reciprocal of the other: one of the two was edited"
            )
        return {"scale": move(tensors["weight_scale"].view(torch.uint8)), "tensor_scale": scale}

    def layout(self, grid: tuple[int, int]) -> Sizes:
        return {"weight_scale": (torch.float8_e4m3fn, grid), "weight_global_scale": (torch.float32, (1,))}

    def note(self, made: Quantized) -> str:
        """The tensor's own scale: the reciprocal of its reciprocal may be another number."""
        return float(made.tensors["tensor_scale"]).hex()


def _exponents(scale: Tensor) -> Tensor:
    """The bytes of powers of two.

    Raises:
        LayoutError: one is no power of two from 2^-127 to 2^127.
    """
    fraction, power = torch.frexp(scale.double())  # float32's own subnormal numbers are normal ones here
    if bool((fraction != 0.5).any()) or bool(((power < -126) | (power > 128)).any()):
        raise LayoutError("a scale is no power of two from 2^-127 to 2^127; expected powers of two, as the layout has")
    return (power + 126).to(torch.uint8)


def _grid(made: Quantized) -> Tensor:
    """What the codes of each tile are multiplied by, in float32."""
    scales = made.quantizer.scales
    if scales is None:
        return torch.ones(1, 1, dtype=torch.float32, device="cpu")
    return _finite(scales.rule.multiplier(made.tensors, made.quantizer.format).float())


def _finite(scale: Tensor) -> Tensor:
    if not bool(scale.isfinite().all()):
        raise _lost()
    return scale


def _lost() -> LayoutError:
    return LayoutError("a scale is no finite number, since a weight was not; train again from the last finite weights")
