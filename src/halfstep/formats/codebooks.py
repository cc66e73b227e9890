"""The 4-bit codebooks for weights and the 8-bit maps of 8-bit optimizers. All values are exact in float32."""

import itertools
from struct import pack, unpack

from halfstep.formats.lookup import Codebook


def _float32(value: float) -> float:
    return float(unpack("<f", pack("<f", value))[0])


def _dynamic(signed: bool) -> tuple[float, ...]:
    """The values of a dynamic map: 0, 1, and seven decades, each with twice as many values as the one below: the
    midpoints of a linear split of [0.1, 1], scaled."""
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade * (1 if signed else 2)
        step = _float32(_float32(1 - _float32(0.1)) / parts)
        edges = [
            _float32(_float32(0.1) + step * i) if 2 * i < parts + 1 else _float32(1 - step * (parts - i))
            for i in range(parts + 1)
        ]
        scale = _float32(10.0 ** (decade - 6))
        means = [_float32(_float32(low + high) / 2) for low, high in itertools.pairwise(edges)]
        values += [sign * _float32(scale * mean) for mean in means for sign in ((1, -1) if signed else (1,))]
    return tuple(sorted(values))


nf4 = Codebook(
    "nf4",
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    source="Dettmers et al. 2023, arXiv 2305.14314 (QLoRA); values of bitsandbytes",
    aliases=("normalfloat4",),
)

bnb_fp4 = Codebook(
    "bnb_fp4",
    tuple(_float32(sign * v / 12) for sign in (1.0, -1.0) for v in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
    source="bitsandbytes' FP4: not e2m1, and its codes are not in the order of their values",
)

af4 = Codebook(
    "af4",
    tuple(
        _float32(v)
        for v in (
            *(-1.0, -0.69441008, -0.51243739, -0.3736951, -0.25607552, -0.14982478, -0.04934812, 0.0),
            *(0.04273164, 0.12934483, 0.21961274, 0.31675666, 0.42563882, 0.55496234, 0.72424863, 1.0),
        )
    ),
    source="Yoshida 2023, arXiv 2306.06965 (AF4 for blocks of 64); values of bitsandbytes",
)

dynamic8 = Codebook(
    "dynamic8", _dynamic(signed=True), source="Dettmers et al. 2022, arXiv 2110.02861: dynamic tree quantisation"
)
dynamic8_unsigned = Codebook(
    "dynamic8_unsigned", _dynamic(signed=False), source="Dettmers et al. 2022, arXiv 2110.02861, second moments"
)
