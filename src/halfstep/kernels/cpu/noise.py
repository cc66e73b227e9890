"""The noise of stochastic rounding in lanes: `quant.noise_bits`, bit for bit."""

from typing import Any

import numpy as np
from numba import types
from torch import Tensor

from halfstep.kernels.cpu.compiled import CHUNK, none, specialized
from halfstep.kernels.cpu.lanes import Lane, lanes
from halfstep.quant.rounding import Seed


def seed_keys(seed: Seed | None) -> tuple[np.uint32, np.uint32] | None:
    """A 64-bit seed as the two uint32 that kernels take, lower half first; None for None."""
    assert not isinstance(seed, Tensor)
    if seed is None:
        return None
    return np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32 & 0xFFFFFFFF)


def mix(x: Lane) -> Lane:
    """`quant.rounding._mix`: the integer hash lowbias32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@lanes(types.uint32)
def _left_key(seed_low: Lane, chunk: Lane) -> Lane:
    return mix(mix(seed_low + 0x9E3779B9) ^ chunk.to(32))


@lanes(types.uint32)
def _first_key(seed_low: Lane, seed_high: Lane, left: Lane, chunk: Lane) -> Lane:
    high = mix(mix(seed_low + 0x9E3779B9) ^ seed_high)
    return mix(left + high + (chunk >> 32).to(32) * 0x9E3779B9)


@lanes(types.uint32)
def _second_key(first: Lane, left: Lane) -> Lane:
    return mix(first ^ left)


@specialized
def chunk_keys(seed, chunk):
    """In kernels: the two noise keys of a chunk (`quant.rounding.noise_keys`); None without a seed."""

    def drawn(seed, chunk):
        left = _left_key(seed[0], np.int64(chunk))
        first = _first_key(seed[0], seed[1], left, np.int64(chunk))
        return first, _second_key(first, left)

    return (lambda seed, chunk: None) if none(seed) else drawn


@specialized
def keys_at(seed, place):
    """In kernels: the keys of the chunk of element `place`, offset so that the index counts from that element; None
    without a seed."""

    def drawn(seed, place):
        keys = chunk_keys(seed, place // CHUNK)
        return np.uint32(keys[0] + place % CHUNK), keys[1]

    return (lambda seed, place: None) if none(seed) else drawn


@specialized
def column_keys(seed, to, tall, count):
    """In kernels: `keys_at` for each of `count` columns written `tall` elements apart from `to` on, each within one
    chunk."""

    def drawn(seed, to, tall, count):
        first, second = np.empty(count, np.uint32), np.empty(count, np.uint32)
        for i in range(count):
            first[i], second[i] = keys_at(seed, to + i * tall)
        return first, second

    return (lambda seed, to, tall, count: None) if none(seed) else drawn


def noise(keys: list[Lane] | None, index: Lane) -> Any:
    """32 bits of noise for the element with that index in the chunk; None without keys."""
    if keys is None:
        return None
    x = keys[0] + index.to(32)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ keys[1]
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
