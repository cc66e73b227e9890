"""The types in which tensors are stored: torch's names, the bits of a value, and the array that holds pieces."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StoredType:
    """A type: `bits` of one value in the file, and the numpy type of the pieces."""

    name: str
    bits: int
    piece: np.dtype

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """The bytes that a tensor of this shape takes; packed types are filled up to whole bytes."""
        return -(-math.prod(shape) * self.bits // 8)


def _types(code: str, bits: int, *names: str) -> dict[str, StoredType]:
    return {name: StoredType(name, bits, np.dtype(code)) for name in names}


FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
"""The types of 8 bits that torch has."""

TYPES = {
    **_types("<u8", 64, "float64"),
    **_types("<u4", 32, "float32"),
    **_types("<u2", 16, "float16", "bfloat16"),
    **_types("u1", 8, *FLOAT8, "float4_e2m1fn_x2", "bool", "uint8"),
    **_types("u1", 6, "float6_e2m3fn", "float6_e3m2fn"),
    **_types("u1", 4, "float4_e2m1fn"),
    **_types("i1", 8, "int8"),
    **_types("<i2", 16, "int16"),
    **_types("<i4", 32, "int32"),
    **_types("<i8", 64, "int64"),
    **_types("<u2", 16, "uint16"),
    **_types("<u4", 32, "uint32"),
    **_types("<u8", 64, "uint64"),
    **_types("<c8", 64, "complex64"),
    **_types("<c16", 128, "complex128"),
}
"""Every type by torch's name."""
