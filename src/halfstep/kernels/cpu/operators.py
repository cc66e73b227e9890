"""The kernels as torch operators: under `torch.compile` each is one opaque node that writes to `out`.

Formats travel by name, so `named` must hold. An operator takes the kernel that supports the call, else the reference;
what is asked of the tensors' memory is asked when it runs, not while it is traced. Outside of `torch.compile` the
kernels' own `run` is quicker.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep import formats, quant
from halfstep.errors import FormatError
from halfstep.formats import Format
from halfstep.kernels.cpu import blocks, cast, codes, posit
from halfstep.quant.cast import decode as reference_decode
from halfstep.quant.cast import encode as reference_encode
from halfstep.quant.quantizer import get_quantizer


_LIBRARY = torch.library.Library("halfstep", "FRAGMENT")


def named(format: Format) -> bool:
    """Whether the format is the one that has its name."""
    try:
        return formats.get(format.name) == format
    except FormatError:
        return False


def round_to(x: Tensor, out: Tensor, format: str, rounding: str, overflow: str, seed: int | None) -> None:
    """`quant.round_to` into `out`, a tensor of its own. `seed` is for stochastic rounding: a signed 64-bit number."""
    target = formats.get(format)
    if posit.supports(x, out, target, rounding):
        posit.run(x, out, formats.get(format, formats.Posit))
    elif cast.supports(x, out, target, rounding, overflow):
        cast.run(x, out, target, rounding, overflow, seed)
    else:
        quant.round_to(x, target, rounding, overflow, seed, out)


def encode(x: Tensor, out: Tensor, format: str, rounding: str, overflow: str, seed: int | None) -> None:
    """`quant.cast.encode` into `out`."""
    target = formats.get(format)
    if posit.supports_encode(x, out, target, rounding):
        posit.run_encode(x, out, formats.get(format, formats.Posit))
    elif not codes.supports(x, out, target, rounding, overflow) or not codes.run(
        x, out, target, rounding, overflow, seed
    ):
        out.copy_(reference_encode(x, target, rounding, overflow, seed))  # which reports a NaN without a code


def decode(stored: Tensor, out: Tensor, format: str) -> None:
    """`quant.cast.decode` into `out`."""
    target = formats.get(format)
    if not codes.supports_decode(stored, out, target) or not codes.run_decode(stored, out, target):
        out.copy_(reference_decode(stored, target, out.dtype))


def round_blocks(x: Tensor, out: Tensor, format: str, scale: str | None, rounding: str, seed: int | None) -> None:
    """The values that a block format of that name and scale rule stands for, into `out`, a tensor of its own."""
    quantizer = get_quantizer(format, scale=scale, rounding=rounding)
    if blocks.supports_values(x, out, quantizer):
        blocks.run_values(x, out, quantizer, seed)
    else:
        quantizer.quantize(x, seed).dequantize(out.dtype, out)


_ROUNDING = "str format, str rounding, str overflow, int? seed"
for _name, _schema, _function in (
    ("round_to", f"(Tensor x, Tensor(a!) out, {_ROUNDING}) -> ()", round_to),
    ("encode", f"(Tensor x, Tensor(a!) out, {_ROUNDING}) -> ()", encode),
    ("decode", "(Tensor stored, Tensor(a!) out, str format) -> ()", decode),
    (
        "round_blocks",
        "(Tensor x, Tensor(a!) out, str format, str? scale, str rounding, int? seed) -> ()",
        round_blocks,
    ),
):
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _function, "CPU")
    _LIBRARY.impl(_name, lambda *arguments: None, "Meta")
