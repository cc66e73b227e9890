"""transformers' KV cache in 8 or 4 bits, with scales for each head of each token.

from halfstep.integrations.kv_cache import LowBitCache

model.generate(tokens, past_key_values=LowBitCache(model.config, "int8"))
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from halfstep import formats, ops
from halfstep.errors import MissingLibraryError, ModelError, QuantizationError, one_of
from halfstep.quant import Quantized, Quantizer, Scales, Tile, get_quantizer
from halfstep.quant.quantizer import layout
from halfstep.quant.scaling import get_scaling


with MissingLibraryError.of("hf"):
    from transformers.cache_utils import DynamicCache, DynamicLayer


def _scaled(format: str, columns: int, rule: str) -> Quantizer:
    return Quantizer(formats.get(format), scales=Scales(Tile(1, columns), get_scaling(rule)))


KINDS = {
    "int8": _scaled("int8", 0, "absmax"),
    "e4m3fn": _scaled("e4m3fn", 0, "absmax"),
    "mxfp8": get_quantizer("mxfp8_e4m3"),
    "int4": _scaled("int4", 32, "absmax_bf16"),
    "mxfp4": get_quantizer("mxfp4"),
}
"""Quantizers of keys and values by name: one scale per head of a token, or one per 32 values of it."""


class LowBitCache(DynamicCache):
    """A DynamicCache that stores keys and values as codes: each head of each token is rounded separately, once.

    Keys and values are decoded at every call, those of the prompt too, so that a prompt in one call and token by token
    gives the same codes. Beam search, cropping and selecting samples move codes and round nothing again.

    Args:
        config: the model's.
        keys: how keys are stored: a name of `KINDS`, or a Quantizer with one or more scales per row.
        values: the same for values; None is the same as keys.

    Raises:
        QuantizationError: there is no such name, or the quantizer's scales span several rows.
        ModelError: a layer of the model does not store all of its keys and values (sliding windows, linear attention).
    """

    def __init__(self, config: Any, keys: str | Quantizer = "int8", values: str | Quantizer | None = None) -> None:
        super().__init__(config=config)
        kinds = _kind(keys), _kind(keys if values is None else values)
        for number, layer in enumerate(self.layers):
            if type(layer) is not DynamicLayer:
                raise ModelError(
                    f"layer {number} of this {type(config).__name__} has a {type(layer).__name__}; expected full "
                    "attention, which stores all keys and values. Generate with transformers' own cache"
                )
        self.layers = [_Layer(*kinds) for _ in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all codes and scales."""
        layers: list[Any] = [layer for layer in self.layers if isinstance(layer, _Layer) and layer.is_initialized]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values as bytes, (batch, heads, tokens, bytes): the codes of each row, followed by its scales."""

    def __init__(self, keys: Quantizer, values: Quantizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds = keys, values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.sizes = key_states.shape[-1], value_states.shape[-1]
        self.keys, self.values = (torch.tensor([], dtype=torch.uint8, device=self.device) for _ in range(2))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        kinds = self.kinds
        given = (_packed(kind, x) for kind, x in zip(kinds, (key_states, value_states), strict=True))
        kept = super().update(*given, *args, **kwargs)
        keys, values = (_unpacked(*each, self.dtype) for each in zip(kinds, kept, self.sizes, strict=True))
        return keys, values


def _kind(given: str | Quantizer) -> Quantizer:
    if isinstance(given, str):
        return KINDS[one_of("kind of KV cache", given, KINDS, QuantizationError)]
    scales = given.scales
    if (
        scales is None or scales.tile.rows != 1 or scales.rule.two_level or given.stateful
        or given.clamp is not None or given.outliers is not None
    ):  # fmt: skip
        raise QuantizationError(
            f"a KV cache stored as {given.format.name} ({scales or 'no scales'}): each token is rounded separately. "
            f"Expected scales per row or part of a row, without clamp and outliers, or one of {', '.join(KINDS)}"
        )
    return given


def _packed(kind: Quantizer, x: Tensor) -> Tensor:
    """The bytes of each row: codes and scales."""
    made = ops.quantize(x.detach(), kind).tensors
    rows = prod(x.shape[:-1])
    parts = [made[name].reshape(rows, -1).view(torch.uint8) for name in layout(kind, tuple(x.shape), x.dtype)]
    return torch.cat(parts, -1).view(*x.shape[:-1], -1)


def _unpacked(kind: Quantizer, rows: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The values decoded from rows of bytes."""
    shape = (*rows.shape[:-1], columns)
    laid: dict[str, Any] = layout(kind, shape, dtype)
    parts = rows.split_with_sizes([size * own.itemsize for own, (_, size) in laid.values()], -1)
    sizes = zip(laid.items(), parts, strict=True)
    made = {name: part.contiguous().view(own).view(-1, size) for (name, (own, (_, size))), part in sizes}
    return Quantized(kind, shape, dtype, made).dequantize()
