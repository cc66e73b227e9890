"""Buffers rounded by a cast: found by `audit` from their bits, warned of by `apply`; exact tables give no finding."""

import math

import pytest
import torch
from torch import nn

import halfstep
from families import for_each
from halfstep.bits.origin import narrowed
from halfstep.bits.scan import scan
from halfstep.bits.values import InMemory
from tiny import adamw


class Rotary(nn.Module):
    def __init__(self, persistent=False):
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(32, 32)
        self.register_buffer("inv_freq", frequencies(), persistent=persistent)


def frequencies(size=32, theta=10000.0):
    return 1.0 / theta ** (torch.arange(0, size).float() / size)


def found(*setup):
    return [one for one in halfstep.audit(*setup).findings if one.what == "rounded buffers"]


@pytest.mark.quick("bfloat16-bf16-split", "half-bf16-master", "half-bf16-split")
@pytest.mark.parametrize("recipe", ["bf16-mixed", "fp16-mixed", "bf16-master", "bf16-split", "fp8-current", "fp32"])
@pytest.mark.parametrize("cast", ["bfloat16", "half"])
@pytest.mark.filterwarnings("ignore:.*parameters arrive in 16 bits")
def test_buffers_cast_before_prepare_are_found(recipe, cast):
    model = getattr(Rotary(), cast)()
    assert ((model.inv_freq.double() - frequencies()) * 4000).abs().max() > (1 if cast == "bfloat16" else 0.1)
    with pytest.warns(UserWarning, match=r"1 of 1 buffers arrive rounded to 16 bits \(inv_freq in torch.b?float16\)"):
        model, optimizer, scaler = halfstep.prepare(model, adamw(model), recipe)
    assert not torch.equal(model.inv_freq.float(), frequencies())
    (finding,) = found(model, optimizer, scaler)
    assert (finding.level, finding.tensors) == ("warning", ("inv_freq",))
    assert "type(m)(m.config).inv_freq" in finding.text
    model.inv_freq = frequencies()
    assert halfstep.audit(model, optimizer, scaler).warnings == ()


def test_buffers_cast_back_to_float32_are_found():
    for persistent, level in (
        (False, "warning"),
        (True, "note"),
    ):  # a persistent buffer may be rounded in the 16-bit file
        model = Rotary(persistent).bfloat16().float()
        (finding,) = found(model, adamw(model))
        assert (finding.level, finding.tensors) == (level, ("inv_freq",))
        assert "buffers in float32, every value exactly bf16" in finding.text
    model = Rotary().half().float()
    assert "every value exactly fp16" in found(model, adamw(model))[0].text
    assert found(Rotary(), None) == []


def test_recipe_without_float32_warns_only_in_the_audit():
    model = Rotary().bfloat16()
    model, optimizer, scaler = halfstep.prepare(model, adamw(model), "bf16-stochastic")  # warnings are errors here
    assert found(model, optimizer, scaler)[0].level == "note"
    model = Rotary()
    model, optimizer, scaler = halfstep.prepare(model, adamw(model), "bf16-stochastic")
    assert halfstep.audit(model, optimizer, scaler).findings == ()


def test_16_bit_scales_beside_codes_give_no_finding():
    model = Rotary()
    model.register_buffer("scale", torch.rand(64).half())
    assert found(model)[0].tensors == ("scale",)
    model.register_buffer("qweight", torch.arange(64, dtype=torch.int32))
    assert found(model) == []
    halfstep.apply(model, "bf16-mixed")


ROUNDED = {
    "frequencies": frequencies(),
    "frequencies of a long context": frequencies(64, 5e5),
    "four frequencies": frequencies(4),
    "cosines": torch.outer(torch.arange(64.0), frequencies()).cos(),
    "slopes of 12 heads": 2.0 ** -(torch.arange(1, 13) * 8 / 12),
    "a schedule": torch.linspace(1e-4, 0.02, 1000),
    "statistics": torch.linspace(-3, 3, 99).exp(),
    "pixels of images": torch.tensor([0.485, 0.456, 0.406, 0.229, 0.224, 0.225]),
    "log mel": (torch.arange(1, 80) / 7).log(),
}
EXACT = {
    "zeros and ones": torch.tensor([0.0, 1.0] * 40),
    "positions": torch.arange(256.0),
    "a mask": torch.full((8, 8), torch.finfo(torch.bfloat16).min).triu(1),
    "an infinite mask": torch.full((8, 8), -math.inf).triu(1),
    "slopes of 8 heads": 2.0 ** -torch.arange(1.0, 9),
    "their products with positions": (2.0 ** -torch.arange(1.0, 9))[:, None] * torch.arange(256.0),
    "k / 128": torch.arange(-128, 128) / 128,
    "k / 256": torch.arange(257) / 256,
    "a binomial kernel": torch.tensor([1.0, 4, 6, 4, 1]) / 16,
    "one number": torch.full((64,), 1.1015625),
    "none": torch.zeros(0),
    "a table of E4M3": torch.arange(126, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
}


@for_each("name", ROUNDED)
def test_rounded_tables_are_recognised(name):
    for dtype in (torch.bfloat16, torch.float16):
        short = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        values = ROUNDED[name].to(dtype)
        assert narrowed(scan(InMemory(values)), str(dtype)[6:]) == short
        assert narrowed(scan(InMemory(values.float())), "float32") == short
    assert narrowed(scan(InMemory(ROUNDED[name])), "float32") is None


@for_each("name", EXACT)
def test_exact_tables_are_not_reported(name):
    for values in (EXACT[name], EXACT[name].bfloat16(), EXACT[name].half()):
        assert torch.equal(values.float(), EXACT[name]) or name == "a mask"
        assert narrowed(scan(InMemory(values)), str(values.dtype)[6:]) is None
