"""Audits saved, loaded and compared; tensors with unusual strides and storages."""

import json

import pytest
import torch
from torch import nn

import halfstep
from halfstep.auditing import Audit
from halfstep.auditing.setup import leaves, place, rounds_to, scanned, size
from halfstep.errors import CheckpointError
from tiny import adamw, mlp, prepared, train


def audited(steps=3, name="bf16-master"):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, steps)
    return halfstep.audit(model, optimizer, scaler)


def test_saved_audit_loads_equal(tmp_path):
    report = audited()
    report.save(tmp_path / "audit.json")
    assert Audit.load(tmp_path / "audit.json") == report
    assert str(Audit.load(tmp_path / "audit.json")) == str(report)
    data = json.loads((tmp_path / "audit.json").read_text())
    assert (data["schema"], data["nbytes"], len(data["rows"])) == (1, report.nbytes, len(report.rows))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is a JSON list"),
        ("{}", r"holds schema None; expected an audit of schema 1: save it again with halfstep.audit\("),
        ('{"schema": 1, "items": []}', r"is not a whole audit \('model'\); save it again"),
    ],
)
def test_files_without_an_audit_raise(tmp_path, text, message):
    (tmp_path / "audit.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Audit.load(tmp_path / "audit.json")


def test_differences_name_changes_and_ignore_missing_gradients():
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = adamw(model)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    before = halfstep.audit(model, optimizer)
    optimizer.zero_grad()
    assert halfstep.audit(model, optimizer).differences(before) == ()
    state = optimizer.state[model[0].weight]
    state["exp_avg"] = state["exp_avg"].bfloat16()
    state["exp_avg_sq"].zero_()
    del optimizer.state[model[0].bias]["exp_avg"]
    optimizer.state[model[0].bias]["more"] = torch.zeros(3, dtype=torch.int8)
    assert sorted(halfstep.audit(model, optimizer).differences(before)) == [
        "exp_avg: float32 (full) before, bfloat16 (full) now: 0.weight",
        "exp_avg: float32 (full) before, missing now: 0.bias",
        "exp_avg_sq: float32 (full) before, float32 (?) now: 0.weight",
        "more: missing before, int8 now: 0.bias",
    ]
    assert halfstep.audit(model, adamw(model)).differences(before)[0] == (
        "steps counted by the optimizer: 1 before, none now"
    )
    wider = nn.Sequential(nn.Linear(64, 128))
    assert "parameters: shape (64, 64) before, (128, 64) now: 0.weight" in halfstep.audit(wider).differences(before)


def test_loss_scale_lost_on_resume_is_a_difference():
    assert audited(name="fp16-mixed").differences(audited(name="fp16-mixed")) == ()
    model = mlp()
    scales = [halfstep.audit(model, None, torch.amp.GradScaler("cpu", init_scale=scale)) for scale in (8.0, 4.0)]
    assert scales[1].differences(scales[0]) == ("loss scale: 8.0 before, 4.0 now",)


@pytest.mark.quick(
    "<lambda>1-dtype2",
    "<lambda>3-dtype2",
    "<lambda>4-dtype3",
    "<lambda>5-dtype3",
    "<lambda>6-dtype0",
    "<lambda>6-dtype1",
    "<lambda>6-dtype2",
    "<lambda>6-dtype3",
    "<lambda>6-dtype4",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::3, 1::2],
        lambda t: t[:, None].expand(-1, 5, -1)[:, 0],
        lambda t: t.view(4, 32, 8, 8).permute(3, 1, 0, 2),
        lambda t: t[5, 7],
        lambda t: t[:, :1],
        lambda t: t[:0],
    ],
)
def test_scan_reads_any_strides(view, dtype, monkeypatch):
    monkeypatch.setattr("halfstep.bits.scan.CHUNK", 256)  # so that contiguous runs are split between and within rows
    tensor = view(torch.randn(128, 64).to(dtype))
    found, dense = scanned(tensor), scanned(tensor.float().contiguous().to(dtype))
    if not tensor.numel():
        assert found is None
        return
    assert found.table.size == tensor.numel()
    assert found.table.lowest == dense.table.lowest
    assert (found.table.counts == dense.table.counts).all()
    assert (found.amax, found.smallest) == (dense.amax, dense.smallest)
    assert found.amax == tensor.double().abs().max().item()


def test_size_of_expanded_tensor_is_its_storage():
    tensor = torch.tensor([0.3]).expand(1000, 7)
    assert (size(tensor), scanned(tensor).table.size) == (4, 1)


def test_tensors_without_values_are_not_scanned():
    assert scanned(torch.zeros(4, 4, device="meta")) is None
    assert place(torch.zeros(4, 4, device="meta")) is None
    freed = torch.zeros(4)
    freed.untyped_storage().resize_(0)
    assert (scanned(freed), size(freed)) == (None, 0)
    assert scanned(torch.arange(4)) is None
    report = halfstep.audit(nn.Linear(4, 4, device="meta"))
    assert (report.nbytes, report.findings) == (80, ())


class Codes(torch.Tensor):
    """A traceable wrapper subclass of two tensors, as torchao's states are."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.detach.default
        return cls(args[0].codes, args[0].scale)


def test_leaves_are_the_inner_plain_tensors():
    codes, scale, sparse = torch.zeros(4, dtype=torch.uint8), torch.ones(1), torch.eye(3).to_sparse()
    value = {"a": [Codes(codes, scale), 3, None], "b": (torch.ones(2),), "c": sparse}
    assert [(path, t.dtype) for path, t in leaves(value, "s")] == [
        ("s.a.0.codes", torch.uint8),
        ("s.a.0.scale", torch.float32),
        ("s.b.0", torch.float32),
        ("s.c.indices", torch.int64),
        ("s.c.values", torch.float32),
    ]


def test_wrapper_state_is_reported_by_its_inner_tensors():
    model = nn.Linear(8, 8, bias=False)
    optimizer = adamw(model)
    optimizer.state[model.weight]["exp_avg"] = Codes(torch.zeros(8, 8, dtype=torch.uint8), torch.ones(1))
    rows = {row.kind: (row.dtype, row.nbytes) for row in halfstep.audit(model, optimizer).rows}
    assert rows == {"parameters": ("float32", 256), "exp_avg.codes": ("uint8", 64), "exp_avg.scale": ("float32", 4)}


def test_rounds_to_compares_values_and_shapes():
    full = torch.randn(33, 5)
    assert rounds_to(full, full.bfloat16())
    assert rounds_to(full.t(), full.half().t())
    assert not rounds_to(full, full.half().t())
    assert not rounds_to(full, torch.nextafter(full.bfloat16(), torch.tensor(9.0).bfloat16()))
    assert not rounds_to(full, Codes(full.bfloat16(), torch.ones(1)))
