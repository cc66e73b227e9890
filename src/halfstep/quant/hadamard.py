"""Random Hadamard transforms: an orthogonal rotation along a matmul's shared dimension, before operands are rounded.

(A R) (R^T B) = A B: the result is the same, and an outlier is spread over a block of the shared dimension. Scales of
blocks as small as the rotation gain nothing: a block's largest value is stored well in any case.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.errors import QuantizationError
from halfstep.quant.rounding import Seed, capturing, check_drawing, derive_seed, drawn, noise_bits


RANDOM = "random"
_SIGNS = "the signs of a Hadamard transform"
_WORD = 32  # signs per integer
_NVFP4 = "+++-+------+-+--"


@dataclass(frozen=True)
class Hadamard:
    """A rotation of blocks of `size` values: x becomes x R, with R = diag(s) H / sqrt(size), signs s and Sylvester's
    matrix H: H_1 = [1], H_2n = [[H_n, H_n], [H_n, -H_n]].

    `seed` None is the sign vector of NVFP4's recipe, of size 16; an integer draws signs that never change; `"random"`
    draws them for each matmul, as stochastic rounding does its noise.

    Raises:
        QuantizationError: the size is no power of two from 2 on, or it is not 16 and there is no seed; another seed.

    Source: NVIDIA Transformer Engine and torchao (hadamard_utils), for the sign vector; Tseng et al. 2025, arXiv
    2502.20586, whose code draws the signs for each product.
    """

    size: int = 16
    seed: int | str | None = None

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 2 or self.size & self.size - 1:
            raise QuantizationError(f"a Hadamard transform of size {self.size!r}: expected a power of two, 2, 4, 8 ...")
        if self.seed is None and self.size != len(_NVFP4):
            raise QuantizationError(
                f"a Hadamard transform of size {self.size} without a seed: NVFP4's signs are {len(_NVFP4)}; give a "
                f"seed, an integer or {RANDOM!r}"
            )
        if self.seed is not None and type(self.seed) is not int and self.seed != RANDOM:
            raise QuantizationError(
                f"seed = {self.seed!r} of a Hadamard transform; expected an integer, {RANDOM!r} or none (NVFP4's signs)"
            )
        _ = self._fixed  # cached now: a traced graph cannot take a cached property's lock

    def __str__(self) -> str:
        return f"Hadamard {self.size}" + ("" if self.seed is None else f", signs {self.seed}")

    @cached_property
    def _fixed(self) -> str:
        """The constant signs, as `+` or `-`; empty where they are drawn. Text, since `torch.compile(dynamic=True)`
        makes symbols of numbers."""
        if self.seed is None:
            return _NVFP4
        if self.seed == RANDOM:
            return ""
        return "".join("+-"[derive_seed(int(self.seed), i) >> 63] for i in range(self.size))

    @property
    def still(self) -> "Hadamard":
        """This transform, but with constant signs where they would be drawn for each matmul: for a caller that only
        inspects, and must not draw from a run's generator."""
        return replace(self, seed=0) if self.seed == RANDOM else self

    def signs(self, device: torch.device | str | None = None, seed: Seed | None = None) -> Tensor:
        """s, float32 (size). Both operands of a matmul need the same: another call may draw others.

        Args:
            seed: determines signs that are drawn for each matmul; None draws them from torch's default generator.

        Raises:
            QuantizationError: they are drawn for each matmul while a CUDA graph is captured that is no
                `halfstep.CUDAGraph`.
        """
        there = None if device is None else torch.device(device)
        on_gpu = there is not None and there.type == "cuda"
        if self._fixed:
            negative = [sign == "-" for sign in self._fixed]
            return (
                _made_there(_words(negative), self.size, there)
                if on_gpu
                else torch.tensor([-1.0 if minus else 1.0 for minus in negative], device=device, dtype=torch.float32)
            )
        if seed is not None:
            return _made_of(seed, self.size, there)
        if on_gpu:
            draw, words = partial(_drawn_words, self.size), -(-self.size // _WORD)
            return _made_there(drawn(_SIGNS, draw, words, there), self.size, there)
        if capturing():
            check_drawing(_SIGNS, there)
        return (1 - 2 * torch.randint(0, 2, (self.size,), dtype=torch.int64, device="cpu")).to(device, torch.float32)


def _made_of(seed: Seed, size: int, device: torch.device | None) -> Tensor:
    """The signs for a seed: its bits; for more than 64 signs, the first bits of the seed's noise."""
    if size > 2 * _WORD:
        negative = noise_bits(seed, 0, size, device) >> 31
    else:
        places = torch.arange(size, dtype=torch.int64, device=device)
        whole = seed if isinstance(seed, Tensor) else torch.full_like(places, seed - (seed >> 63 << 64))
        negative = whole >> places & 1
    return 1.0 - 2.0 * negative.float()


def _drawn_words(size: int) -> list[int]:
    return _words(torch.randint(0, 2, (size,), dtype=torch.int64, device="cpu").tolist())


def _words(negative: Sequence[bool | int]) -> list[int]:
    """Signs packed in integers, one bit each."""
    words = (negative[start : start + _WORD] for start in range(0, len(negative), _WORD))
    return [sum(bool(bit) << i for i, bit in enumerate(word)) for word in words]


def _made_there(words: Sequence[int] | Tensor, size: int, device: torch.device | None) -> Tensor:
    """The signs unpacked on the device: copying them from the host would synchronize."""
    places = torch.arange(min(_WORD, size), device=device, dtype=torch.int64)  # sizes are powers of two
    whole = (word if isinstance(word, Tensor) else torch.full_like(places, word) for word in words)
    return 1.0 - 2.0 * torch.cat([word >> places & 1 for word in whole]).float()


def rotate(x: Tensor, signs: Tensor, dim: int = -1) -> Tensor:
    """Every block of len(signs) values along `dim` as x R, in float32 (float64 for float64 input).

    A short last block is padded with zeros, so the dimension grows to whole blocks: both operands of a matmul are
    padded alike, so its result does not change.

    The order of operations is fixed, so that kernels can follow it: values are multiplied by their signs; then, for h =
    1, 2, 4 ... size / 2, each pair (a, b) at indices i and i + h, where i has no bit h, becomes (a + b, a - b); then
    all are multiplied by 1 / sqrt(size), rounded to float32 (exact for sizes 4, 16, 64 ...). Every step is rounded
    once.

    >>> rotate(torch.tensor([16.0] + [0.0] * 15), Hadamard().signs())[:4]
    tensor([4., 4., 4., 4.])
    """
    size, dim = len(signs), dim % x.dim()
    wide = x if x.dtype == torch.float64 else x.float()
    beyond = -wide.shape[dim] % size
    if beyond:
        wide = F.pad(wide, (*[0, 0] * (wide.dim() - 1 - dim), 0, beyond))
    before, length, after = wide.shape[:dim], wide.shape[dim], wide.shape[dim + 1 :]
    blocks = wide.reshape(*before, length // size, size, *after)
    blocks = blocks * signs.to(wide.dtype).view(size, *[1] * len(after))
    h = 1
    while h < size:
        a, b = blocks.reshape(*before, length // (2 * h), 2, h, *after).unbind(dim + 1)
        blocks = torch.stack((a + b, a - b), dim + 1)
        h *= 2
    return blocks.reshape(wide.shape) * math.sqrt(1 / size)
