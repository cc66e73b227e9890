"""Other libraries' counterparts of halfstep's quantizers: how to call them, and how far their values agree.

A peer that is not installed or does not build is left out and named; the others run without it.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Way:
    """One library's way of doing the work."""

    run: Callable[[], Any]
    values: Callable[[Any], Tensor] = lambda result: result
    """Converts a result of `run` to values."""
    agrees: float = 1.0
    """The least share of elements that must equal the reference: peers differ at the ends of their range."""


Ways = dict[str, Way]


@dataclass(frozen=True)
class Scalar:
    """A float format with its names in other libraries."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    torch: torch.dtype | None = None
    ml_dtypes: str | None = None
    gfloat: str | None = None
    """The name in `gfloat.formats`; None for IEEE style, which is built from its fields."""

    @property
    def common(self) -> float:
        """The share of normally distributed values on which peers with another range agree: it is lower with fewer
        exponents."""
        return {2: 0.5, 3: 0.85}.get(self.exponent_bits, 0.97)


FLOATS = (
    Scalar("e4m3fn", 4, 3, torch.float8_e4m3fn, "float8_e4m3fn", "format_info_ocp_e4m3"),
    Scalar("e5m2", 5, 2, torch.float8_e5m2, "float8_e5m2", "format_info_ocp_e5m2"),
    Scalar("e2m1fn", 2, 1, None, "float4_e2m1fn", "format_info_ocp_e2m1"),
    Scalar("e3m4", 3, 4, None, "float8_e3m4"),
    Scalar("e8m5", 8, 5),
)

MODULES = {
    "ml_dtypes": ("ml_dtypes",),
    "gfloat": ("gfloat", "gfloat.formats"),
    "qtorch": ("qtorch.quant",),
    "unit-scaling": ("unit_scaling.formats",),
    "torchao": ("torchao.prototype.mx_formats.mx_tensor", "torchao.prototype.mx_formats.nvfp4_tensor"),
    "bitsandbytes": ("bitsandbytes.functional",),
}


class Peers:
    """The peers that can be imported (`versions`), and the reasons why others cannot (`missing`)."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {"torch": torch.__version__}
        self.missing: dict[str, str] = {}
        self._modules: dict[str, list[ModuleType]] = {}
        # qtorch compiles itself when it is imported, and looks for ninja on the path.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        for logger in ("torchao", "torch.utils._pytree"):  # torchao warns of CUDA libraries that it cannot load
            logging.getLogger(logger).setLevel(logging.ERROR)
        for name, modules in MODULES.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._modules[name] = [importlib.import_module(module) for module in modules]
                self.versions[name] = version(name)
            except (ImportError, OSError, RuntimeError, PackageNotFoundError) as error:  # RuntimeError: does not build
                self.missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def round(self, scalar: Scalar, x: Tensor, mode: str = "TiesToEven") -> Tensor | None:
        """x rounded to the format by gfloat, saturating: the reference for results. None without gfloat."""
        if "gfloat" not in self:
            return None
        gfloat, table = self._modules["gfloat"]
        info = getattr(table, scalar.gfloat) if scalar.gfloat else _ieee(gfloat, scalar)
        rounded = gfloat.round_ndarray(info, x.numpy().astype(np.float64), gfloat.RoundMode[mode], True)
        return torch.from_numpy(rounded.astype(np.float32))

    def values(self, scalar: Scalar, x: Tensor, slow: bool) -> Ways:
        """Ways to round to the format, to nearest, and back to float32; with `slow`, slow ones too."""
        ways: Ways = {}
        array, dtype = x.numpy(), scalar.torch
        if dtype is not None:
            ways["torch"] = Way(lambda: x.to(dtype).to(torch.float32))
        if scalar.ml_dtypes and "ml_dtypes" in self:
            narrow = getattr(self._modules["ml_dtypes"][0], scalar.ml_dtypes)
            ways["ml_dtypes"] = Way(lambda: array.astype(narrow).astype(np.float32), torch.from_numpy)
        if "unit-scaling" in self:
            ways["unit-scaling"] = Way(self._unit_scaling(scalar, x, "nearest"), agrees=scalar.common)
        if "qtorch" in self:
            ways["qtorch"] = Way(self._qtorch(scalar, x, "nearest"), agrees=scalar.common)
        if slow and scalar.gfloat and "gfloat" in self:
            gfloat, table = self._modules["gfloat"]
            info = getattr(table, scalar.gfloat)
            ways["gfloat"] = Way(lambda: gfloat.round_ndarray(info, array, sat=True), torch.from_numpy)
        return ways

    def stochastic(self, scalar: Scalar, x: Tensor, slow: bool) -> Ways:
        """Ways to round to the format stochastically and back; with `slow`, slow ones too."""
        ways: Ways = {}
        if "qtorch" in self:
            ways["qtorch"] = Way(self._qtorch(scalar, x, "stochastic"), agrees=scalar.common)
        if slow and "unit-scaling" in self:
            ways["unit-scaling"] = Way(self._unit_scaling(scalar, x, "stochastic"), agrees=scalar.common)
        return ways

    def codes(self, scalar: Scalar, x: Tensor) -> Ways:
        """Ways to convert to codes of the format, to nearest."""
        ways: Ways = {}
        array, dtype = x.numpy(), scalar.torch
        if dtype is not None:
            ways["torch"] = Way(lambda: x.to(dtype), Tensor.float)
        if scalar.ml_dtypes and "ml_dtypes" in self:
            narrow = getattr(self._modules["ml_dtypes"][0], scalar.ml_dtypes)
            ways["ml_dtypes"] = Way(
                lambda: array.astype(narrow), lambda codes: torch.from_numpy(codes.astype(np.float32))
            )
        return ways

    def block_codes(self, name: str, x: Tensor) -> Ways:
        """Ways to convert to codes and scales of a block format."""
        return {who: Way(encode, decode) for who, (encode, decode) in self._blocks(name, x).items()}

    def block_values(self, name: str, x: Tensor) -> Ways:
        """Ways to round to a block format and back to float32."""
        return {who: Way(_after(encode, decode)) for who, (encode, decode) in self._blocks(name, x).items()}

    def _blocks(self, name: str, x: Tensor) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor]]]:
        elements = {
            "mxfp8_e4m3": torch.float8_e4m3fn,
            "mxfp8_e5m2": torch.float8_e5m2,
            "mxfp4": torch.float4_e2m1fn_x2,
        }
        if name in elements and "torchao" in self:
            element, mx = elements[name], self._modules["torchao"][0]
            return {
                "torchao": (
                    lambda: mx.to_mx(x, element, 32),  # its default scale rule: floor
                    lambda pair: mx.to_dtype(pair[1], pair[0], element, 32, torch.float32),
                )
            }
        if name == "nvfp4" and "torchao" in self:
            nv = self._modules["torchao"][1]
            return {
                "torchao": (
                    lambda: nv.NVFP4Tensor.to_nvfp4(x, 16, per_tensor_scale=nv.per_tensor_amax_to_scale(x.abs().max())),
                    lambda tensor: tensor.dequantize(torch.float32),
                )
            }
        if name == "nf4" and "bitsandbytes" in self:
            bnb = self._modules["bitsandbytes"][0]
            return {
                "bitsandbytes": (
                    lambda: bnb.quantize_4bit(x, quant_type="nf4", blocksize=64),
                    lambda pair: bnb.dequantize_4bit(*pair),
                )
            }
        if name == "dynamic8" and "bitsandbytes" in self:
            bnb = self._modules["bitsandbytes"][0]
            return {
                "bitsandbytes": (
                    lambda: bnb.quantize_blockwise(x, blocksize=256),
                    lambda pair: bnb.dequantize_blockwise(*pair),
                )
            }
        return {}

    def _unit_scaling(self, scalar: Scalar, x: Tensor, rounding: str) -> Callable[[], Tensor]:
        format = self._modules["unit-scaling"][0].FPFormat(scalar.exponent_bits, scalar.mantissa_bits, rounding)
        return lambda: format.quantise(x)

    def _qtorch(self, scalar: Scalar, x: Tensor, rounding: str) -> Callable[[], Tensor]:
        quantize = self._modules["qtorch"][0].float_quantize
        return lambda: quantize(x, scalar.exponent_bits, scalar.mantissa_bits, rounding)


def _after(encode: Callable[[], Any], decode: Callable[[Any], Tensor]) -> Callable[[], Tensor]:
    return lambda: decode(encode())


def _ieee(gfloat: ModuleType, scalar: Scalar) -> Any:
    exponent_bits, mantissa_bits = scalar.exponent_bits, scalar.mantissa_bits
    return gfloat.FormatInfo(
        scalar.name,
        1 + exponent_bits + mantissa_bits,
        mantissa_bits + 1,
        bias=2 ** (exponent_bits - 1) - 1,
        is_signed=True,
        domain=gfloat.Domain.Extended,
        has_nz=True,
        num_high_nans=2**mantissa_bits - 1,
        has_subnormals=True,
        is_twos_complement=False,
    )
