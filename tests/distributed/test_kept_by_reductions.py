"""The states of reductions in distributed checkpoints: each rank's rounding errors, and FP8-LM's mu."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.distributed import compress, reduce_gradients
from halfstep.recipe import FP4, FP8_LM
from ranks import on_ranks
from tiny import assert_same


pytestmark = pytest.mark.slow
SENT = {"FP4": FP4, "FP8-LM": FP8_LM}
HALF, WHOLE = 3, 6


def built(sent):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, scaler = halfstep.prepare(model, optimizer, "bf16-mixed")
    ddp = DistributedDataParallel(model)
    compress(ddp, SENT[sent], scaler=scaler)
    return ddp, optimizer, scaler


def train_steps(trained, rank, first, last):
    ddp, optimizer, scaler = trained
    for step in range(first, last):
        x = torch.randn(6, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        scaler.scale(ddp(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def state_of(trained):
    ddp, _, scaler = trained
    return {"model": ddp.module.state_dict(), "scaler": scaler}


def copied(trained):
    ddp, _, scaler = trained
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}, scaler.state_dict()


def save_and_train(rank, folder):
    found = {}
    for sent in SENT:
        trained = built(sent)
        train_steps(trained, rank, 0, HALF)
        checkpoint.save(state_of(trained), checkpoint_id=f"{folder}/{sent}")
        then = copied(trained)
        train_steps(trained, rank, HALF, WHOLE)
        found[sent] = then, copied(trained)
    return found


def load_and_train(rank, folder):
    found = {}
    for sent in SENT:
        trained = built(sent)
        try:
            checkpoint.load(state_of(trained), checkpoint_id=f"{folder}/{sent}")
        except checkpoint.CheckpointException as error:
            found[sent] = str(error)
        else:
            then = copied(trained)
            train_steps(trained, rank, HALF, WHOLE)
            found[sent] = then, copied(trained)
    return found


def messages(rank):
    """Warnings for another rank's state, for an empty one, and for one loaded before the reduction exists."""
    found, (ddp, optimizer, scaler) = {}, built("FP4")
    train_steps((ddp, optimizer, scaler), rank, 0, 1)
    own = scaler.state_dict()
    kept = own["halfstep"]["communication"]
    whose = next(name for name in kept if name.startswith("rounding errors"))
    changed = {whose.replace(f"rank {rank}", f"rank {1 - rank}"): kept[whose], "communication": kept["communication"]}
    for what, communication in (("other", changed), ("none", {})):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            scaler.load_state_dict({**own, "halfstep": {**own["halfstep"], "communication": communication}})
        found[what] = [str(each.message) for each in told]
    model = nn.Linear(4, 4)
    _, _, scaler = halfstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        scaler.load_state_dict({**own, "halfstep": {**scaler.state_dict()["halfstep"], "communication": kept}})
    found["before"] = [str(each.message) for each in told]
    reduce_gradients(model, FP4)  # without gradients: it creates the reduction
    found["then"] = sorted(scaler.state_dict()["halfstep"]["communication"][whose])
    return found


def test_checkpoints_restore_every_ranks_rounding_errors(tmp_path):
    folder = tmp_path / "saved"
    folders = [tmp_path / name for name in ("saved", "first", "again", "three")]
    for each in folders:
        each.mkdir()
    whole = on_ranks(save_and_train, folders[1], folder)
    again = on_ranks(load_and_train, folders[2], folder)
    for before, after in zip(whole, again, strict=True):
        assert_same(after, before)
    kept = [rank["FP4"][0][1]["halfstep"]["communication"] for rank in whole]
    own = [each[f"rounding errors of rank {rank} of 2"]["0.weight"] for rank, each in enumerate(kept)]
    assert not torch.equal(*own)
    for rank in on_ranks(load_and_train, folders[3], folder, world=3):
        assert "rounding errors of rank" in rank["FP4"]
        assert "of 3" in rank["FP4"]
        assert_same(rank["FP8-LM"][0], whole[0]["FP8-LM"][0])  # mu is the same on all ranks


def test_another_ranks_rounding_errors_are_not_loaded_and_warn(tmp_path):
    for rank, found in enumerate(on_ranks(messages, tmp_path)):
        (other,), (none,), (before,) = found["other"], found["none"], found["before"]
        assert f"whose state is the rounding errors of rank {rank} of 2" in other
        assert f"the scaler's state has rounding errors of rank {1 - rank} of 2 instead" in other
        assert "it starts over (save the scaler's state on each rank" in other
        assert "the scaler's state has nothing instead" in none
        assert "reduce_gradients(model, ...) before there are gradients" in before
        assert found["then"] == ["bias", "weight"]
