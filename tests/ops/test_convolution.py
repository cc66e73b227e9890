"""Convolutions whose 16-bit matmuls are emulated in float32, against torch's own and against exact ones."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep.nn.adapters.convolution import CONVOLUTION
from halfstep.nn.layers import kind_of
from tiny import assert_same


pytestmark = pytest.mark.cpu
LAYERS = [
    (nn.Conv1d(3, 4, 5, stride=2, padding=2), (2, 3, 9)),
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", groups=2), (2, 4, 7, 5)),
    (nn.Conv2d(3, 4, 2, dilation=2, bias=False), (2, 3, 6, 6)),
    (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
    (nn.ConvTranspose1d(3, 4, 4, stride=2, padding=1), (2, 3, 5)),
    (nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1, groups=2), (2, 4, 3, 3)),
]
every_layer = pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda v: type(v).__name__)


def passes(layer, x, recipe):
    """The output, the input's gradient and the parameters' gradients under a recipe."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    halfstep.apply(layer, recipe)
    try:
        y = layer(x)
        y.square().sum().backward()
    finally:
        halfstep.revert(layer)
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


@every_layer
@pytest.mark.parametrize("recipe", ["bf16-mixed", "fp16-mixed"])
def test_emulated_convolutions_match_torchs_up_to_the_order_of_sums(layer, shape, recipe, carry):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    carry(torch.bfloat16, torch.float16)
    ours = passes(layer, x, recipe)
    carry()
    stock = passes(layer, x, recipe)
    ulp = {"bf16-mixed": 2.0**-7, "fp16-mixed": 2.0**-10}[recipe]
    for a, b in zip(ours, stock, strict=True):
        assert (a - b).abs().max() <= 4 * ulp * b.abs().max()
    assert not torch.equal(ours[0], layer(x))


@every_layer
def test_the_emulated_forward_is_the_exact_result_rounded_once(layer, shape, carry):
    carry(torch.float16)
    x = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).float()
    with torch.no_grad():  # small integers: every sum is exact in float32 in any order
        for p in layer.parameters():
            p.copy_(torch.randint(-8, 9, p.shape, generator=torch.Generator().manual_seed(1)))
    expected = layer.double()(x.double()).to(torch.float16).float()
    assert_same(passes(layer.float(), x, "fp16-mixed")[0], expected.detach())


def test_subclasses_with_their_own_forward_and_patched_layers_are_not_adapted():
    class Mine(nn.Conv2d):
        def forward(self, x):
            return super().forward(x)

    patched = nn.Conv2d(1, 1, 1)
    patched.forward = lambda x: x
    assert kind_of(Mine(1, 1, 1)) is None
    assert kind_of(patched) is None
    assert kind_of(nn.Linear(1, 1)) is not CONVOLUTION
    assert kind_of(nn.Conv2d(1, 1, 1)) is CONVOLUTION
