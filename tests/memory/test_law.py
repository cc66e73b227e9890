"""The formula of activation memory: against published figures, and to the byte against a layer that runs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.accounting.subject import Blank
from halfstep.errors import AccountError
from halfstep.memory import activation_bytes, measure_step


S, B, H, A = 128, 2, 256, 4


class Layer(nn.Module):
    """GPT's layer with an explicit softmax: two norms, three dropouts, GELU."""

    def __init__(self, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.proj = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.dropout = dropout

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(S, B, A, 3 * H // A).chunk(3, -1)
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        weights = F.softmax((q @ k.mT) * (H // A) ** -0.5, dim=-1)
        mixed = F.dropout(weights, self.dropout) @ v if self.dropout else weights @ v
        x = x + self.dropped(self.proj(mixed.permute(2, 0, 1, 3).reshape(S, B, H)))
        return x + self.dropped(self.down(F.gelu(self.up(self.norm2(x)))))

    def dropped(self, x):
        return F.dropout(x, self.dropout) if self.dropout else x


def saved_by_autograd(dtype, dropout):
    """Bytes of the distinct storages that autograd saves, parameters excluded."""
    layer, kept = Layer(dropout).to(dtype), {}
    owned = {p.untyped_storage()._cdata for p in layer.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            kept[storage._cdata] = tensor, storage.nbytes()
        return tensor

    x = torch.randn(S, B, H, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(x)
    assert output.requires_grad
    return sum(size for _, size in kept.values())


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 6_295_552), (torch.bfloat16, 3_147_776)])
def test_the_formula_is_exact_when_dropout_masks_have_the_values_dtype(dtype, expected):
    law = activation_bytes(B, S, H, A, nbytes=dtype.itemsize, mask_bytes=dtype.itemsize, statistics=True)
    assert saved_by_autograd(dtype, 0.1) == law == expected


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 4_722_688), (torch.bfloat16, 2_361_344)])
def test_the_formula_without_dropout_is_exact(dtype, expected):
    law = activation_bytes(B, S, H, A, nbytes=dtype.itemsize, dropout=False, statistics=True)
    assert saved_by_autograd(dtype, 0.0) == law == expected


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, 5_505_024), (torch.bfloat16, 2_883_584)])
def test_one_byte_masks_underestimate_a_cpus_memory(dtype, expected):
    assert activation_bytes(B, S, H, A, nbytes=dtype.itemsize) == expected < saved_by_autograd(dtype, 0.1)


@pytest.mark.quick("dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measure_step_on_blank_tensors_counts_the_same_bytes(dtype):
    with Blank():
        layer = cast(Layer(0.1), dtype)
        x = torch.zeros(S, B, H, dtype=dtype, requires_grad=True)
        found = measure_step(layer, None, lambda: layer(x).sum(), x)
    assert found.activations == saved_by_autograd(dtype, 0.1) + dtype.itemsize  # and the loss


def cast(layer, dtype):
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(dtype)
    return layer


def per_element(*, nbytes=2, **options):
    """Bytes per element of a layer whose 5 a s / h is 5."""
    return activation_bytes(1, 64, 64, 1, nbytes=nbytes, **options) / 64**2


def test_the_formula_gives_the_figures_of_its_source():
    assert activation_bytes(1, 2048, 12288, 96) == 2048 * 12288 * (34 + 80)  # GPT-3
    assert activation_bytes(1, 2048, 20480, 128) == 2048 * 20480 * (34 + 64)  # MT-NLG
    assert activation_bytes(1, 8192, 4096, 32, recompute="selective") == 34 * 8192 * 4096
    assert round(34 * 8192 * 4096 / 1e9, 3) == 1.141
    assert round((activation_bytes(1, 8192, 4096, 32) - 34 * 8192 * 4096) / 1e9, 3) == 10.737
    assert per_element(parallel=8) == 10 + 24 / 8 + 5 / 8
    assert per_element(parallel=8, split_sequence=True) == (34 + 5) / 8
    assert per_element(parallel=8, split_sequence=True, recompute="selective") == 34 / 8
    assert per_element(recompute="full") == 2


@pytest.mark.parametrize(("nbytes", "linear", "square"), [(4, 66, 9), (2, 34, 5), (1, 18, 3)])
def test_the_formula_agrees_with_eleutherais_calculator(nbytes, linear, square):
    assert per_element(nbytes=nbytes, recompute="selective") == linear
    assert per_element(nbytes=nbytes) == linear + square


def test_the_formula_for_another_mlp_width():
    """Megatron-LM: 18 + 4 ffn / h instead of 34."""
    assert per_element(inner=96, recompute="selective") == 18 + 4 * 96 / 64


def test_an_unknown_recompute_raises():
    with pytest.raises(AccountError, match="unknown way to recompute 'all'"):
        activation_bytes(1, 1, 1, 1, recompute="all")
