"""Models whose parameters are stored as codes: state dicts, files, casts, hooks, wrappers and revert."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import halfstep
from families import for_each, in_turn
from halfstep.errors import ModelError, OptimizerError, QuantizationError
from halfstep.ops import CodeTensor
from tiny import FOUR, SCALED, adamw, assert_same, batch, copied, mlp, prepared, train


every_scaled = pytest.mark.parametrize("name", SCALED)


def values(model):
    return {
        name: p.values() if isinstance(p, CodeTensor) else p.detach().clone() for name, p in model.named_parameters()
    }


def codes(model):
    return {name for name, p in model.named_parameters() if isinstance(p, CodeTensor)}


def backward(model):
    loss = F.mse_loss(model(batch()[0]), batch()[1])
    loss.backward()
    return loss


# ---- state dicts and files ------------------------------------------------------------------------------------------


@pytest.mark.quick("fp8lm-o1", "fp8lm-o2")
@every_scaled
def test_in_place_averages_of_state_dict_entries_reach_the_weights(name):
    """As older ModelEMA classes of ultralytics and timm do it. The entries then hold the rounded values."""
    model, optimizer, scaler = prepared(name)
    average, _, _ = prepared(name)
    expected = values(average)
    for _ in range(3):
        train(model, optimizer, scaler, 1)
        new = model.state_dict()
        entries = average.state_dict()
        for key, value in entries.items():
            value *= 0.5
            value += 0.5 * new[key].detach()
        assert_same(dict(entries), values(average))
        for key, value in values(model).items():
            expected[key] = expected[key] * 0.5 + 0.5 * value
    for key, value in values(average).items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0.15 * float(expected[key].abs().max()))
        assert not torch.equal(value, mlp().state_dict()[key]) or not value.any()


WRITES = {
    "row": lambda x: x.__setitem__(0, 0.25),
    "view": lambda x: x.view(-1)[3:9].mul_(2.0),
    "data": lambda x: setattr(x, "data", torch.ones(16, 8)),
    "data_": lambda x: x.data.clamp_(-0.1, 0.1),
    "out": lambda x: torch.add(x, 1.0, out=x),
    "copy_": lambda x: x.copy_(torch.ones(16, 8)),
}


@pytest.mark.quick("data-fp8lm-o1", "data_-fp8lm-o2", "out-fp8lm-o1")
@every_scaled
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_to_a_state_dict_entry_change_weight_and_master(name, write):
    """The next step starts from the written values."""
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, 1)
    entry, expected = model.state_dict()["0.weight"], values(model)["0.weight"]
    write(entry), write(expected)
    expected = CodeTensor.encode(expected, model[0].weight.quantizer).values()
    assert_same(model[0].weight.values(), expected)
    assert_same(entry.clone(), expected)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, scaler, 1)
    assert_same(model[0].weight.values(), expected)


@pytest.mark.quick("fp8lm-o1", "fp8lm-o2")
@every_scaled
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_hold_plain_values(name, tmp_path):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, 2)
    state, expected = model.state_dict(), values(model)
    torch.save(state, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert {type(value) for value in loaded.values()} == {torch.Tensor}
    save_file(state, tmp_path / "a.safetensors")
    save_model(model, tmp_path / "b.safetensors")
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for found in (loaded, load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")):
        assert_same(dict(found), expected)
    assert_same({key: torch.from_numpy(value.numpy().copy()) for key, value in state.items()}, expected)
    loads = {
        "torch": lambda m: m.load_state_dict(loaded),
        "safetensors": lambda m: load_model(m, tmp_path / "b.safetensors"),
        "dcp": lambda m: dcp.load({"model": m.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True),
        "dcp by parameters": lambda m: set_model_state_dict(m, loaded),
    }
    for load in loads.values():
        fresh, _, _ = prepared(name, mlp(5))
        load(fresh)
        assert_same(values(fresh), expected)
    with pytest.raises(QuantizationError, match=r"or model.state_dict\(\) for files"):
        save_file({"weight": model[0].weight.detach()}, tmp_path / "c.safetensors")


@every_scaled
def test_entries_of_a_state_dict_taken_in_inference_mode_can_be_written_to(name):
    """Such as of the best model, saved by a validation under `@torch.inference_mode()`."""
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, 1)
    expected = copied(model.state_dict())
    with torch.inference_mode():
        entries = model.state_dict()
    assert_same(dict(entries), dict(expected))
    train(model, optimizer, scaler, 1)
    for key, value in entries.items():
        value.copy_(expected[key])
    assert_same(values(model), dict(expected))


@every_scaled
def test_state_dict_with_keep_vars_returns_the_parameters(name):
    model, _, _ = prepared(name)
    assert all(
        entry is p for entry, p in zip(model.state_dict(keep_vars=True).values(), model.parameters(), strict=True)
    )


@every_scaled
def test_a_step_after_loading_with_assign_is_refused(name):
    model, optimizer, _ = prepared(name)
    model.load_state_dict(mlp(3).state_dict(), assign=True)
    backward(model)
    with pytest.raises(OptimizerError, match="no longer belong to the model"):
        optimizer.step()


# ---- casts, copies, hooks -------------------------------------------------------------------------------------------


@every_scaled
def test_no_op_conversions_keep_parameters_values_and_gradients(name):
    model, optimizer, scaler = prepared(name)
    backward(model)
    before, grads, parameters = (
        values(model),
        {n: p.grad for n, p in model.named_parameters()},
        list(model.parameters()),
    )
    model.float().to("cpu").share_memory()
    assert all(p.is_shared() for p in model.parameters())
    assert_same(values(model), before)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert all(p.grad is grads[n] for n, p in model.named_parameters())
    scaler.step(optimizer)
    model.zero_grad()
    backward(model)
    assert isinstance(model[0].weight.grad, CodeTensor)


@every_scaled
@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, nn.Module.double])
def test_casts_are_refused(name, cast):
    model, _, _ = prepared(name)
    with pytest.raises(ModelError, match=r"cast the model before halfstep.prepare, or halfstep.revert it first"):
        cast(model)


@every_scaled
def test_prepare_and_revert_keep_hooks_and_attributes_of_parameters(name):
    model, seen = mlp(), []
    weight = model[0].weight
    weight.mark = "kept"
    handles = [weight.register_hook(lambda grad: seen.append("hook") or grad * 0)]
    handles += [weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))]
    model, _, _ = prepared(name, model)
    assert model[0].weight is weight
    backward(model)
    assert seen == ["hook", "accumulated"]
    assert isinstance(weight.grad, CodeTensor)
    assert not weight.grad.values().any()
    for handle in handles:
        handle.remove()
    backward(model)
    assert len(seen) == 2
    assert weight.grad.values().any()
    kept = weight.grad.values()
    halfstep.revert(model)
    assert model[0].weight is weight
    assert vars(weight) == {"mark": "kept"}
    assert_same(weight.grad, kept)
    backward(model)
    assert type(weight) is nn.Parameter
    assert type(weight.grad) is torch.Tensor


@every_scaled
def test_deleted_models_are_freed(name):
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler)
    state = model.state_dict()
    parts = [weakref.ref(part) for part in (*model.modules(), *model.parameters())]
    del model, optimizer, scaler
    gc.collect()
    assert not [part for part in parts if part() is not None]
    assert state["0.weight"].any()


# ---- revert ---------------------------------------------------------------------------------------------------------


@every_scaled
def test_the_optimizer_steps_in_float32_after_revert(name):
    """Gradients are no longer multiplied by a scale."""
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler, 2)
    halfstep.revert(model)
    assert not codes(model)
    before, twin = values(model), mlp()
    twin.load_state_dict(before)
    stock = adamw(twin)
    stock.load_state_dict(copied(optimizer.float32_state_dict()))
    for each in (model, twin):
        backward(each)
    optimizer.step()
    stock.step()
    for key, value in values(model).items():
        torch.testing.assert_close(value, values(twin)[key], rtol=1e-5, atol=1e-6)
        assert not torch.equal(value, before[key])


@every_scaled
def test_backward_of_a_forward_before_prepare_or_revert_is_refused(name):
    model = nn.Sequential(nn.Linear(8, 4))
    early = F.mse_loss(model(batch()[0]), batch()[1])
    prepared(name, model)
    with pytest.raises(ModelError, match="run the forward again"):
        early.backward()
    late = F.mse_loss(model(batch()[0]), batch()[1])
    halfstep.revert(model)
    with pytest.raises(ModelError, match="run the forward again"):
        late.backward()


# ---- fused, shared and wrapped weights ------------------------------------------------------------------------------


@pytest.mark.quick("fp8lm-o3")
@every_scaled
def test_fused_and_shared_weights_are_codes_and_train(name):
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].weight = model[1].weight
    model, optimizer, scaler = prepared(name, model, adamw(model))
    attention = ("0.self_attn.in_proj_weight", "0.self_attn.out_proj.weight")
    assert codes(model) == {*attention, "0.linear1.weight", "0.linear2.weight", "1.weight"}
    assert model[1].weight is model[2].weight
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
    losses = train(model, optimizer, scaler, 20, data=(x, x), loss_of=F.mse_loss)
    assert losses[-1] < 0.8 * losses[0]
    stock = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 8), nn.Linear(8, 8))
    stock[2].weight = stock[1].weight
    stock.load_state_dict(model.state_dict())
    found, expected = model.eval()(x), stock.eval()(x)
    near = 0.35 if name in FOUR else 0.12  # twice what three seeds show
    assert (found - expected).norm() <= near * expected.norm()


def test_stacked_experts_are_not_stored_as_codes_and_reported():
    config = MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2)
    model = nn.ModuleDict({"experts": MixtralExperts(config), "mlp": nn.Linear(8, 8)})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    twin = copy.deepcopy(model)
    report = halfstep.apply(twin, "fp8lm-o3")
    stacks = ("experts.gate_up_proj", "experts.down_proj")
    assert all("one scale would serve all experts" in report.kept[name] for name in stacks)
    model, _, _ = prepared("fp8lm-o3", model, adamw(model))
    assert codes(model) == {"mlp.weight"}


class Halved(nn.Module):
    def forward(self, weight):
        return 0.5 * weight


class Kept(Halved):
    def right_inverse(self, weight):
        return 2 * weight


def halved(layer, how):
    parametrize.register_parametrization(layer, "weight", how())


CHANGES = {"spectral norm": parametrizations.spectral_norm, "halved": partial(halved, how=Halved)}
CHANGES |= {"kept": partial(halved, how=Kept)}  # registration writes new values, which are no codes


@for_each("name, change", in_turn(SCALED, list(CHANGES)))
def test_a_weight_parametrized_after_prepare_trains_and_reverts(name, change):
    losses = []
    for recipe in ("bf16-mixed", name):
        model, optimizer, scaler = prepared(recipe)
        torch.manual_seed(1)
        CHANGES[change](model[0])
        losses.append(train(model, optimizer, scaler, 4))
        assert (codes(model) == {"0.parametrizations.weight.original", "3.weight"}) == (
            recipe == name and change != "kept"
        )
        parametrize.remove_parametrizations(model[0], "weight")
        halfstep.revert(model)
        assert not codes(model)
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


@every_scaled
def test_a_pruned_weight_stays_codes_under_its_mask(name):
    model, _, _ = prepared(name)
    prune.l1_unstructured(model[0], "weight", 0.5)
    backward(model)
    assert isinstance(model[0].weight_orig, CodeTensor)
    assert (model[0].weight == 0).float().mean() == 0.5
    assert_same(model[0].weight_orig.grad.values() == 0, model[0].weight_mask == 0)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.quick("{}-fp4-wang", "{'gradient_as_bucket_view': True}-fp8lm-o1", "{'static_graph': True}-fp8lm-o1")
@every_scaled
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_ddp_on_one_rank_equals_training_without(name, options, one_rank):
    found = []
    for wrapped in (False, True):
        model, optimizer, scaler = prepared(name)
        called = nn.parallel.DistributedDataParallel(model, **options) if wrapped else model
        losses = train(called, optimizer, scaler, 3)
        found.append((losses, values(model)))
    assert_same(*found)


@every_scaled
def test_sharding_a_prepared_model_is_refused_at_the_first_step(name, one_rank):
    model, optimizer, _ = prepared(name)
    torch.distributed.fsdp.fully_shard(model, mesh=one_rank)
    backward(model)
    with pytest.raises(OptimizerError, match=r"call halfstep.apply"):
        optimizer.step()


def test_a_refused_cast_leaves_all_dtypes_unchanged():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 4))
    model, optimizer, scaler = prepared("fp8lm-o3", model)
    before = {name: p.dtype for name, p in model.named_parameters()}
    for cast in (model.half, model.bfloat16, model.double, lambda: model.to(torch.float16)):
        with pytest.raises(ModelError, match=r"1.weight is stored as .*codes, and would become torch"):
            cast()
        assert {name: p.dtype for name, p in model.named_parameters()} == before
    model.float().to("cpu")
    train(model, optimizer, scaler)
    halfstep.revert(model)
    assert {p.dtype for p in model.half().parameters()} == {torch.float16}
