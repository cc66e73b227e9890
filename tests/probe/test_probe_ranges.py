"""Range counts against casts by numpy and ml_dtypes, of tensors that the test captures itself."""

import copy
import math

import ml_dtypes
import numpy as np
import pytest
import torch

import halfstep
import planted
from halfstep import formats
from halfstep.bits.what_if import limits_of
from halfstep.errors import FormatError
from halfstep.probe.observe import Counts, count
from planted import tokens


DTYPES = {
    "fp16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn, "e2m1": ml_dtypes.float4_e2m1fn,
}  # fmt: skip
every_format = pytest.mark.parametrize("name", DTYPES)


def spread(name):
    """Magnitudes over more than the format's range, including its ends and their ties."""
    format = formats.get(name)
    low, high = math.log2(format.smallest) - 4, min(math.log2(format.max) + 4, 127.9)
    x = np.exp2(np.random.default_rng(0).uniform(max(low, -148), high, 20_000))
    ends = [format.max, format.smallest, format.smallest / 2, format.min_normal]
    ends += [format.max * (1 + 2.0 ** -(format.mantissa_bits + 2)), format.min_normal - format.smallest / 2]
    with np.errstate(over="ignore"):
        near = np.concatenate(
            [np.float32(ends), np.nextafter(np.float32(ends), 0), np.nextafter(np.float32(ends), 1e38)]
        )
        return np.concatenate([x.astype(np.float32), near, np.zeros(7, np.float32)]) * np.float32(-1)


def expected(x, name):
    """Counts from the other library's cast, which saturates only for formats without infinity and NaN."""
    format, x = formats.get(name), x.astype(np.float32)
    with np.errstate(over="ignore"):
        cast = x.astype(DTYPES[name]).astype(np.float32)
    stored = name in ("fp16", "bf16")
    beyond = ~np.isfinite(cast) if stored else np.abs(x) > format.max
    gone = (cast == 0) & (x != 0)
    subnormal = (cast != 0) & (np.abs(cast) < format.min_normal)
    size = np.abs(x).astype(np.float64)
    lost = size[gone].sum() + (0 if stored else (size[beyond] - format.max).sum())
    return Counts(
        float(size.max()), x.size, int((x != 0).sum()), int(beyond.sum()), int(subnormal.sum()), int(gone.sum()),
        float(size.sum()), float(lost),
    )  # fmt: skip


def assert_counts(found, wanted):
    exact = ("largest", "values", "nonzero", "beyond", "subnormal", "vanished")
    assert {name: getattr(found, name) for name in exact} == {name: getattr(wanted, name) for name in exact}
    assert found.magnitude == pytest.approx(wanted.magnitude, rel=1e-5)
    assert found.lost == pytest.approx(wanted.lost)


@every_format
def test_counts_equal_casts_by_other_libraries(name):
    x = spread(name)
    found = count(torch.from_numpy(x), limits_of(formats.get(name), stored=name in ("fp16", "bf16")))
    assert_counts(found, expected(x, name))
    assert found.vanished
    assert found.subnormal


def test_posits_neither_overflow_nor_underflow():
    x = torch.tensor([1e-30, 1.0, -1e30, 0.0])
    found = count(x, limits_of(formats.get("posit8_1"), stored=False))
    assert (found.vanished, found.beyond, found.nonzero) == (0, 1, 3)


def test_format_wider_than_float32_loses_nothing():
    x = torch.tensor([1e-45, 0.0, 3e38, 1.0])
    found = count(x, limits_of(formats.get("e10m5"), stored=True))
    assert (found.vanished, found.subnormal, found.beyond, found.nonzero) == (0, 0, 0, 3)


def test_attention_masks_are_ignored_but_nonfinite_values_count():
    limits = limits_of(formats.get("fp16"), stored=True)
    mask = torch.tensor([-math.inf, torch.finfo(torch.float32).min, -2.0])
    assert count(mask, limits) == Counts(2.0, 1, 1, magnitude=2.0)
    assert count(torch.tensor([-math.inf]), limits) == Counts()
    assert count(torch.empty(0), limits) == Counts()
    assert count(torch.tensor([math.inf, 1.0]), limits).largest == math.inf
    assert math.isnan((count(torch.tensor([math.nan, 1.0]), limits) + Counts(3.0)).largest)


def squares(model, batch):
    return model(batch).square().sum() / 2 / batch.numel()


def captured(model, batches):
    """The values of some tensors by name, captured with the test's own hooks."""
    model, held = copy.deepcopy(model), {}

    def keep(name, tensor):
        held.setdefault(name, []).append(tensor.detach().numpy().ravel().copy())

    def after(module, args, output):
        keep("input of blocks.1.ffn.wo (Linear)", args[0])
        keep("output of blocks.1.ffn.wo (Linear)", output)
        args[0].register_hook(lambda grad: keep("gradient of the input of blocks.1.ffn.wo (Linear)", grad))
        output.register_hook(lambda grad: keep("gradient of the output of blocks.1.ffn.wo (Linear)", grad))

    model.blocks[1].ffn.wo.register_forward_hook(after)
    for batch in batches:
        model.zero_grad()
        squares(model, batch).backward()
        keep("gradient of the weight of embed (Embedding)", model.embed.weight.grad)
    keep("weight of blocks.1.ffn.wo (Linear)", model.blocks[1].ffn.wo.weight)
    return {name: np.concatenate(pieces) for name, pieces in held.items()}


@pytest.mark.quick("wide_ffn-bf16")
@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("make", [planted.healthy, planted.wide_ffn])
def test_probe_ranges_equal_separately_captured_tensors(make, name):
    model, batches = make(), [tokens(1), tokens(2), tokens(3)]
    report = halfstep.probe_model(model, name, data=batches, loss=squares)
    found = {str(f.site): f for f in report.ranges}
    held = captured(model, batches)
    assert len(held) == 6
    for site, x in held.items():
        assert_counts(found[site].counts, expected(x, name))
    wo = found["input of blocks.1.ffn.wo (Linear)"]
    assert wo.headroom == pytest.approx(math.log2(formats.get(name).max / wo.counts.largest))


def test_unsigned_format_raises():
    with pytest.raises(FormatError, match="no negative values; probe one that can hold activations"):
        halfstep.probe_model(planted.healthy(), "e8m0", data=[tokens()])
