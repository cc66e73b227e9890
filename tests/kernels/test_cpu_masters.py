"""Masters follow overwritten weights: the CPU kernel equals torch's operations, and keeps what an update left."""

import pytest
import torch

from halfstep.kernels.cpu import masters as kernel
from halfstep.ops import follow
from halfstep.quant.masters import get_master, list_masters
from oracles.numbers import every_16_bit_value, same_bits
from tiny import assert_same, copied


KINDS = [kind for kind in list_masters() if kind in kernel.KEPT]
FLOATS = {"fp32": (torch.bfloat16, torch.float16)}
CASES = [(kind, dtype) for kind in KINDS for dtype in FLOATS.get(kind, (torch.bfloat16,))]
every_case = pytest.mark.parametrize(("kind", "dtype"), CASES)


def pairs(kind, dtype, count=1 << 16, seed=0):
    """All weights, half of them with arbitrary master parts, half with plausible ones."""
    generator = torch.Generator().manual_seed(seed)
    weight = every_16_bit_value(dtype).repeat(-(-count // 65536))[:count].clone()
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)
    ((name, held),) = get_master(kind).keeps.items()
    if held == torch.float32:
        anything = bits.view(torch.float32)
        near = weight.float() * (1 + (torch.rand(count, generator=generator) - 0.5) * 2.0**-7)
    elif held == torch.bfloat16:
        anything = bits.to(torch.int16).view(torch.bfloat16)
        near = (weight.float() * (torch.rand(count, generator=generator) - 0.5) * 2.0**-6).bfloat16()
    else:
        anything = near = bits.to(held)
    return weight, {name: torch.where(torch.rand(count, generator=generator) < 0.5, anything, near)}


@every_case
@pytest.mark.parametrize("count", [0, 1, 7, 65536, 2 * 65536 + 5])
def test_the_kernel_equals_the_reference(kind, dtype, count):
    master = get_master(kind)
    weight, kept = pairs(kind, dtype, count)
    expected = copied(kept)
    before = copied(weight)
    master.follow(weight, expected)
    assert kernel.run(weight, kind, kept)
    same_bits(weight, before)
    for name, tensor in kept.items():
        same_bits(tensor, expected[name])
    again = copied(kept)
    follow(master, weight, again)
    for name, tensor in again.items():
        same_bits(tensor, kept[name])


def finite(tensors):
    return torch.stack([t.float().isfinite() for t in tensors]).all(0)


@every_case
@pytest.mark.parametrize("scale", [2.0**-137, 2.0**-125, 2.0**-20, 1.0, 2.0**100])
@pytest.mark.parametrize("ratio", [2.0**-12, 2.0**-8, 1.0, 2.0**8])
def test_following_unchanged_weights_keeps_their_masters(kind, dtype, scale, ratio):
    """Weights that cross zero leave more than half an ulp in the second part, and fresh masters round to another
    weight."""
    if dtype == torch.float16 and not 2.0**-25 < scale < 2:
        pytest.skip("beyond fp16")
    master, generator = get_master(kind), torch.Generator().manual_seed(3)
    full = torch.randn(60_000, generator=generator) * scale
    weight = torch.empty(full.shape, dtype=dtype)
    kept = master.start(weight, full)
    for _ in range(5):
        before = copied(kept)
        follow(master, weight, kept)
        assert_same(kept, before)
        moved = master.read(weight, kept) + torch.randn(full.shape, generator=generator) * (scale * ratio)
        master.write(weight, kept, moved)


@pytest.mark.parametrize("kind", ["kahan", "collage"])
def test_every_residual_of_some_weights_is_kept(kind):
    """`tests/exhaustive/pairs.py` tests all weights."""
    ((name, _),) = get_master(kind).keeps.items()
    every = every_16_bit_value(torch.bfloat16)
    every = every[every.isfinite()]
    for bits in (0, 1, 0x7F, 0x80, 0x3C0, 0x3F80, 0x3F81, 0x3FFF, 0x4080, 0x7E80):
        high = torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16)
        weight = high + every
        rest = every + (high - weight)
        kept = {name: rest.clone()}
        follow(get_master(kind), weight, kept)
        sound = finite([weight, rest])
        same_bits(kept[name][sound], rest[sound])


def test_unsupported_masters_use_torch():
    master = get_master("fp32")
    weight = torch.zeros(4, 3).bfloat16().t()
    kept = {"master": torch.ones(3, 4)}
    assert not kernel.run(weight, "fp32", kept)
    follow(master, weight, kept)
    assert_same(kept["master"], torch.zeros(3, 4))
    assert not kernel.run(weight, "none", {})
    assert not kernel.run(weight, "scaled", {"master_codes": torch.ones(3, 4).half()})
