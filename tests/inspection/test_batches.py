"""Small tensors are read, scanned and judged in batches, with the same results as one by one."""

import gc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file

import halfstep
from halfstep.bits.origin import origin, origins, stored_format
from halfstep.bits.scan import of_scans, scan, scan_small
from halfstep.bits.values import InMemory
from halfstep.inspection.files import File
from halfstep.kernels.cpu.compiled import Kernel


SHAPES = [(), (0,), (1,), (7,), (64,), (16, 16), (4, 64), (3, 0), (40, 70), (8, 3, 3, 3), (129, 33)]
WAYS = {
    "as it is": lambda x: x,
    "bf16": lambda x: x.bfloat16().float(),
    "fp16": lambda x: x.half().float(),
    "e4m3": lambda x: (61.7 * x).to(torch.float8_e4m3fn).float() / 61.7,
    "int4 by rows": lambda x: torch.round(x / _step(x)) * _step(x),
    "a factor": lambda x: x.bfloat16().float() * 0.1,
    "half": lambda x: torch.where(x > 0, x, x.bfloat16().float()),
    "copies": lambda x: x[:1].expand_as(x) if x.dim() else x,
    "signs": lambda x: x.sign() * 0.0312,
    "constant": torch.ones_like,
    "subnormal": lambda x: x * 1e-41,
    "not finite": lambda x: torch.where(x > 0.02, torch.inf, torch.where(x < -0.02, torch.nan, x)),
}


def _step(x):
    return x.abs().amax(-1, keepdim=True) / 7 + 1e-9 if x.dim() and x.numel() else 1.0


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(sorted(WAYS))), min_size=1, max_size=12),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 99),
)
def test_batch_equals_its_tensors_one_by_one(kinds, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    values = [WAYS[way](torch.randn(shape, generator=generator) * 0.02).to(dtype) for shape, way in kinds]
    tensors = [InMemory(x.contiguous()) for x in values]
    wide, name = stored_format(tensors[0].dtype), tensors[0].dtype
    together = scan_small(tensors, [piece for tensor in tensors for piece in tensor.chunks(1 << 24)])
    alone = [scan(tensor) for tensor in tensors]
    assert origins(together, name) == [origin(one, name) for one in alone]
    assert of_scans(together, wide) == [of_scans([one], wide)[0] for one in alone]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one.table.counts, other.table.counts)
        assert (one.channels, one.distinct, one.again) == (other.channels, other.distinct, other.again)


def written(path, count):
    generator = torch.Generator().manual_seed(count)
    shapes = [(64,), (16, 16), (4, 64)]
    tensors = {f"h.{i}.weight": torch.randn(shapes[i % 3], generator=generator) for i in range(count)}
    save_file(tensors, path)
    return path


def calls_of(path, monkeypatch):
    """How often an inspection calls kernels and reads the file."""
    calls = Counter()

    def counted(owner, name):
        function = getattr(owner, name)

        def call(self, *arguments):
            calls[name] += 1
            return function(self, *arguments)

        return call

    with monkeypatch.context() as patch:
        for owner, name in ((Kernel, "__call__"), (File, "read")):
            patch.setattr(owner, name, counted(owner, name))
        halfstep.inspect(path)
    return calls


def test_more_tensors_cost_no_more_kernel_calls_or_reads(tmp_path, monkeypatch):
    few, many = written(tmp_path / "few.safetensors", 90), written(tmp_path / "many.safetensors", 240)
    calls = calls_of(few, monkeypatch)
    assert calls == calls_of(many, monkeypatch)
    assert calls["__call__"] <= 20


def test_interleaved_small_and_large_tensors_are_read_correctly(tmp_path):
    tensors = {}
    for i in range(6):
        tensors |= {f"{i}.a": torch.full((40,), float(i)) + torch.arange(40) / 7, f"{i}.b": torch.randn(200, 100)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = {one.name: one.statistics for one in halfstep.inspect(tmp_path / "model.safetensors").tensors}
    assert {name: one.amax for name, one in found.items()} == {n: float(x.abs().max()) for n, x in tensors.items()}


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_setting_is_restored(tmp_path, enabled):
    path, before = written(tmp_path / "few.safetensors", 3), gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        halfstep.inspect(path)
        assert gc.isenabled() is enabled
        with pytest.raises(halfstep.errors.CheckpointError):
            halfstep.inspect(tmp_path / "none")
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
