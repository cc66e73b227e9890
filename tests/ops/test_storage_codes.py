"""Tensors stored as codes and scales by a Storage: zeros are stored like any values, without rounding each."""

import pytest
import torch

from halfstep.ops import codes
from halfstep.recipe import get_recipe, get_storage, list_recipes


KINDS = {
    str(kind): kind
    for name in list_recipes()
    for moments in [get_recipe(name).moments]
    for kind in ([] if isinstance(moments, str) else [get_storage(own) for _, own in moments])
} | {str(kind): kind for kind in map(get_storage, ("mxfp4", "nvfp4", "nf4", "fp8_128x128", "int8", "e5m2", "bf16"))}
SHAPES = [(), (7,), (16,), (0, 4), (3, 40), (5, 3), (2, 3, 24), (64, 130), (40, 512)]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("residual", [False, True])
def test_store_zeros_equals_storing_a_tensor_of_zeros(kind, residual):
    storage = get_storage(kind.quantizer, residual, kind.flat, kind.smallest)
    for shape in SHAPES:
        expected = codes.store(storage, "exp_avg", torch.zeros(shape))
        found = codes.store_zeros(storage, "exp_avg", shape, torch.device("cpu"))
        assert found.keys() == expected.keys()
        for part, tensor in expected.items():
            assert found[part].dtype == tensor.dtype
            assert found[part].shape == tensor.shape
            assert found[part].is_contiguous()
            one, other = (each.reshape(-1).view(torch.uint8) for each in (found[part], tensor))
            assert torch.equal(one, other), (shape, part)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_store_zeros_rounds_only_a_few_values(monkeypatch, kind):
    """Else a model of 7B parameters would wait for an hour under COAT."""
    seen = []
    write = codes.write
    monkeypatch.setattr(codes, "write", lambda *given: (seen.append(given[-1].numel()), write(*given)))
    codes._zero.cache_clear(), codes._zeros_of.cache_clear()
    for name in ("exp_avg", "exp_avg_sq"):
        codes.store_zeros(kind, name, (40, 512), torch.device("cpu"))
    assert seen == [8]
