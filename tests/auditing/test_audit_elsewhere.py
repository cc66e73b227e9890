"""`audit` of setups by other libraries: FSDP2 and DDP on two ranks, torchao's and bitsandbytes' states."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep.auditing import Audit
from ranks import on_ranks
from tiny import adamw, batch, mlp


pytestmark = pytest.mark.slow


def step(model, optimizer, x=None):
    model(batch()[0] if x is None else x).square().mean().backward()
    optimizer.step()
    return halfstep.audit(model, optimizer)


def under_ddp():
    model = torch.nn.parallel.DistributedDataParallel(mlp())
    return step(model, adamw(model))


def under_fsdp():
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    early = adamw(model)
    fully_shard(model[3])
    fully_shard(model)
    return step(model, adamw(model)), halfstep.audit(model, early)


def save_reports(rank, folder):
    for name, report in zip(("ddp", "fsdp", "stale"), (under_ddp(), *under_fsdp()), strict=True):
        report.save(f"{folder}/{name}{rank}.json")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(save_reports, folder, folder)
    return {name: [Audit.load(folder / f"{name}{rank}.json") for rank in (0, 1)] for name in ("ddp", "fsdp", "stale")}


def by_kind(report):
    """Bytes per (kind, dtype), summed over effective precisions."""
    found = {}
    for row in report.rows:
        if row.kind != "step":
            found[row.kind, row.dtype] = found.get((row.kind, row.dtype), 0) + row.nbytes
    return found


def test_fsdp_shards_of_all_ranks_sum_to_the_model(ranks):
    model = mlp()
    alone = step(model, adamw(model))
    assert by_kind(alone).keys() == {(kind, "float32") for kind in ("parameters", "gradients", "exp_avg", "exp_avg_sq")}
    one, two = map(by_kind, ranks["fsdp"])
    assert {key: one[key] + two[key] for key in one} == by_kind(alone)
    assert one == two  # each half: every first dimension is even
    assert [report.findings for report in ranks["fsdp"]] == [(), ()]
    assert {item.name for item in ranks["fsdp"][0].items} == set(dict(model.named_parameters()))


def test_optimizer_made_before_sharding_is_stale(ranks):
    for report in ranks["stale"]:
        assert [one.what for one in report.findings] == ["stale optimizer", "not in the optimizer"]
        assert len(report.findings[0].tensors) == 6


def test_ddp_report_equals_the_plain_models(ranks):
    model = mlp()
    alone = step(model, adamw(model))
    for report in ranks["ddp"]:
        assert by_kind(report) == by_kind(alone)
        assert report.findings == ()
        assert {item.name for item in report.items} == {f"module.{name}" for name, _ in model.named_parameters()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_torchao_8bit_states_are_counted_as_codes_and_scales():
    optim = pytest.importorskip("torchao.optim")
    model = nn.Linear(128, 128)
    report = step(model, optim.AdamW8bit(model.parameters()), torch.randn(4, 128))
    found = by_kind(report)
    assert found["exp_avg.codes", "uint8"] == found["exp_avg_sq.codes", "uint8"] == 128 * 128
    assert found["exp_avg.scale", "float32"] == 128 * 128 // 256 * 4
    assert found["exp_avg", "float32"] == 128 * 4  # the bias is too small for codes
    assert report.warnings == ()


def test_bitsandbytes_8bit_states_are_counted_as_codes():
    bnb = pytest.importorskip("bitsandbytes")
    model = nn.Linear(128, 128)
    report = step(model, bnb.optim.AdamW8bit(model.parameters()), torch.randn(4, 128))
    found = by_kind(report)
    assert found["state1", "uint8"] == found["state2", "uint8"] == 128 * 128
    assert found["state1", "float32"] == 128 * 4
    assert [one.what for one in report.findings] == ["mixed states", "mixed states"]
