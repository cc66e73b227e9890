"""Low-bit AdamW classes without `prepare`: in a plain loop, compared with torch, saved, loaded, cast and refused."""

import copy
import io
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import halfstep
from families import for_each, slow_unless
from halfstep.errors import OptimizerError
from halfstep.memory import measure
from halfstep.optim import AdamW8bit, AdamWFp8, CoatAdamW, LowBitAdamW
from halfstep.optim.rules import no_fused_update
from halfstep.recipe import get_recipe, get_storage
from tiny import assert_same, copied


CLASSES = {kind.__name__: kind for kind in (AdamW8bit, AdamWFp8, CoatAdamW)}
every_class = for_each("kind", CLASSES.values())


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).to(dtype)


def train(model, optimizer, steps, first=0, scheduler=None):
    """A plain training loop with torch's clipping and a scheduler."""
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(x.to(next(model.parameters()).dtype)).float() - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("kind", slow_unless({AdamW8bit}.__contains__, CLASSES.values()))
def test_a_class_trains_like_its_recipe(kind):
    model = net()
    optimizer = kind(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    losses = train(model, optimizer, 30, scheduler=scheduler)
    recipe = get_recipe(kind.recipe_name)
    other = net()
    stock = torch.optim.AdamW(other.parameters(), lr=3e-3, weight_decay=0.1)
    plain = halfstep.Recipe(name="moments", summary="", source="", moments=recipe.moments)
    other, prepared, _ = halfstep.prepare(other, stock, plain)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(prepared, 30)
    assert train(other, prepared, 30, scheduler=schedule) == losses
    assert losses[-1] < 0.9 * losses[0]
    assert optimizer.state[model[0].weight]["exp_avg"].element_size() == 1


def test_low_bit_adamw_with_float32_moments_matches_torch():
    model, other = net(), net()
    losses = train(model, LowBitAdamW(model.parameters(), moments="fp32"), 20)
    assert losses == pytest.approx(train(other, torch.optim.AdamW(other.parameters()), 20), rel=1e-6)


@every_class
def test_states_load_from_and_into_torchs_adamw(kind):
    """From float32 moments, rounded once; and into them exactly."""
    model = net()
    stock = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, stock, 3)
    optimizer = kind(model.parameters(), lr=1e-3)
    optimizer.load_state_dict(stock.state_dict())
    wide = optimizer.float32_state_dict()
    for number, parameter in enumerate(model.parameters()):
        for name in ("exp_avg", "exp_avg_sq"):
            storage = optimizer.recipe.moment(name, parameter.numel())
            exact = stock.state[parameter][name]
            kept = halfstep.ops.codes.store(storage, name, exact)
            assert_same(
                wide["state"][number][name], halfstep.ops.codes.read(storage, name, kept, tuple(parameter.shape))
            )
    again = torch.optim.AdamW(model.parameters(), lr=1e-3)
    again.load_state_dict(wide)
    assert_same(again.state[model[0].weight]["exp_avg"], wide["state"][0]["exp_avg"])
    train(model, again, 1)
    assert float(again.state[model[0].weight]["step"]) == 4


@every_class
def test_a_run_resumed_from_a_file_is_exact(kind):
    model = net()
    optimizer = kind(model.parameters(), lr=3e-3)
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)  # weights_only: plain tensors
    other = net()
    resumed = kind(other.parameters(), lr=1.0)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert train(other, resumed, 3, 3) == train(model, optimizer, 3, 3)
    assert_same(other.state_dict(), model.state_dict())


@every_class
def test_deep_copies_train_identically(kind):
    model = net()
    optimizer = kind(model.parameters())
    train(model, optimizer, 2)
    twin, twins = copy.deepcopy((model, optimizer))
    assert type(twins) is kind
    assert train(twin, twins, 2, 2) == train(model, optimizer, 2, 2)


@every_class
def test_groups_and_options_work_like_torchs(kind):
    model = net()
    groups = [{"params": [model[0].weight], "lr": 1e-2, "weight_decay": 0.0}, {"params": [model[2].weight]}]
    optimizer = kind(groups, lr=1e-4, betas=(0.8, 0.9), eps=1e-6)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-4]
    optimizer.add_param_group({"params": [model[2].bias]})
    assert optimizer.param_groups[2]["betas"] == (0.8, 0.9)
    train(model, optimizer, 2)
    with pytest.raises(OptimizerError, match="amsgrad"):
        kind(model.parameters(), amsgrad=True)
    with pytest.raises(OptimizerError, match=r"parameter 0 \(weight\) is torch.float64.*convert it"):
        kind(nn.Linear(3, 3).double().named_parameters())
    with pytest.raises(OptimizerError, match=r"parameter 0 is torch.complex64: its imaginary part would be lost"):
        kind([nn.Parameter(torch.zeros(4, dtype=torch.complex64))])


def test_missing_gradients_are_skipped_and_sparse_ones_refused():
    model = nn.ModuleDict(
        {"used": nn.Linear(64, 64), "unused": nn.Linear(64, 64), "table": nn.Embedding(8, 4, sparse=True)}
    )
    optimizer = AdamW8bit(model["used"].parameters())
    optimizer.add_param_group({"params": list(model["unused"].parameters())})
    model["used"](torch.ones(1, 64)).sum().backward()
    before = copied(dict(model["unused"].state_dict()))
    optimizer.step()
    assert_same(dict(model["unused"].state_dict()), before)
    optimizer.add_param_group({"params": list(model["table"].parameters())})
    model["table"](torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match=r"sparse_coo gradient.*Build its embedding with sparse=False"):
        optimizer.step()


@pytest.mark.slow
def test_block_size_and_min_8bit_size_apply():
    model = net()
    sizes = {}
    for block in (64, 256):
        optimizer = AdamW8bit(model.parameters(), block_size=block, min_8bit_size=6144)
        train(model, optimizer, 1)
        sizes[block] = optimizer.state[model[0].weight]["exp_avg_scale"].numel()
        assert optimizer.state[model[0].bias]["exp_avg"].dtype == torch.float32
    assert sizes == {64: 96, 256: 24}
    with pytest.raises(halfstep.HalfstepError, match="tile"):
        AdamW8bit(model.parameters(), block_size=-1)


def test_16_bit_weights_warn_without_stochastic_rounding():
    with pytest.warns(UserWarning, match="AdamW8bit: parameters in torch.bfloat16 .* bf16_stochastic_round=True"):
        AdamW8bit(net(torch.bfloat16).parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = net(torch.bfloat16)
        optimizer = AdamW8bit(model.parameters(), lr=1e-3, bf16_stochastic_round=True, generator=3)
        AdamW8bit(net().parameters())
    losses = train(model, optimizer, 40)
    assert losses[-1] < losses[0]
    late = net()
    optimizer = AdamW8bit(
        late.parameters(), min_8bit_size=10**6
    )  # the warning is about weights, whatever the moments' storage
    late.to(torch.bfloat16)
    with pytest.warns(UserWarning, match="those below half a unit in the last place are lost"):
        train(late, optimizer, 1)
    again = net(torch.bfloat16)
    assert train(again, AdamW8bit(again.parameters(), bf16_stochastic_round=True, generator=3), 40) == losses


def test_torchs_grad_scaler_unscales_and_skips():
    model = net()
    optimizer = AdamW8bit(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    x = torch.ones(4, 64)
    for bad in (False, True):
        before = copied(dict(model.state_dict()))
        scaler.scale(model(x).square().mean()).backward()
        if bad:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before["0.weight"], model[0].weight) == bad
    assert float(optimizer.state[model[0].weight]["step"]) == 1


def test_low_bit_adamw_accepts_a_storage_per_moment():
    optimizer = LowBitAdamW(net().parameters(), moments=(("exp_avg", get_storage("mxfp8_e4m3")), ("*", "bf16")))
    assert optimizer.recipe.moment("exp_avg").quantizer == halfstep.get_quantizer("mxfp8_e4m3")
    with pytest.raises(halfstep.HalfstepError, match="unknown format 'fp9'"):
        LowBitAdamW(net().parameters(), moments="fp9")


def test_a_class_trains_a_model_under_apply_and_prepare_refuses_it():
    """`apply` rounds the products, and the optimizer is one's own; `prepare` refuses it and says so."""
    model = net()
    with pytest.raises(OptimizerError, match=r"AdamW8bit is halfstep's own.*or call halfstep.apply\(model, recipe\)"):
        halfstep.prepare(model, AdamW8bit(model.parameters()), "fp8-current")
    halfstep.apply(model, "fp8-current")
    optimizer = AdamW8bit(model.parameters(), lr=3e-3)
    losses = train(model, optimizer, 30)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(("kind", "size"), [(AdamW8bit, 2.03125), (AdamWFp8, 2.03125), (CoatAdamW, 2.1875)])
def test_measured_state_bytes_equal_the_recipes(kind, size):
    model = nn.Linear(256, 256, bias=False)
    optimizer = kind(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    assert measure(model, optimizer).states == size == get_recipe(kind.recipe_name).bytes_per_parameter().states


@pytest.mark.parametrize("moments", ["fp32", "bf16", get_recipe("adamw-8bit").moments, get_recipe("coat").moments])
def test_a_truncated_state_is_an_error(moments):
    model = nn.Linear(64, 64, bias=False)
    optimizer = LowBitAdamW(model.parameters(), moments=moments)
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
        if optimizer.state:
            state = optimizer.state[model.weight]
            state["exp_avg"] = state["exp_avg"].flatten()[:128].clone()
            with pytest.raises((RuntimeError, halfstep.HalfstepError)):
                optimizer.step()
        else:
            optimizer.step()


BAD = {"its square overflows": 1e25, "infinite": torch.inf, "NaN": torch.nan}
SHARING = ("adamw-8bit", "fp8-adam", "coat", "fp8-fishman", "fp8lm-o2")
"""Recipes whose moments are codes with scales shared by several elements."""


@pytest.mark.parametrize("recipe", slow_unless({"adamw-8bit", "coat"}.__contains__, SHARING))
def test_a_nonfinite_gradient_does_not_affect_other_elements(recipe):
    """Weights are finite where torch's are, with the kernel and with the reference."""
    for grad in BAD.values():
        found = []
        for fused in (True, False, None):
            model = nn.Linear(512, 8, bias=False)
            nn.init.constant_(model.weight, 0.5)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if fused is not None:
                optimizer = LowBitAdamW(model.parameters(), moments=get_recipe(recipe).moments, lr=1e-3)
                optimizer.rule = optimizer.rule if fused else replace(optimizer.rule, fused=no_fused_update)
            for step in range(4):
                model.weight.grad = torch.randn(8, 512, generator=torch.Generator().manual_seed(step)) * 1e-3
                if step == 2:
                    before = model.weight[1, 3].item()
                    model.weight.grad[1, 3] = grad
                optimizer.step()
                if step == 2 and grad == 1e25:
                    assert model.weight[1, 3].item() == pytest.approx(before, rel=1e-4)
            found.append(copied([model.weight.detach(), optimizer.state[model.weight]]))
        (kernels, state), (rules, expected), (stock, _) = found
        assert_same(kernels, rules)
        assert_same(state, expected)
        assert torch.equal(kernels.isfinite(), stock.isfinite())
        assert int((~stock.isfinite()).sum()) == (grad != 1e25)
        others = kernels.isfinite() & (stock != 0)
        assert (kernels[others] - stock[others]).abs().max() < 0.01


@pytest.mark.slow
@for_each("rule", [halfstep.optim.Lion, lambda p, lr: torch.optim.SGD(p, lr, 0.9), torch.optim.RMSprop])
def test_a_nan_gradient_does_not_affect_other_elements_under_other_rules(rule):
    model = nn.Linear(512, 8, bias=False)
    moments = (("*", get_recipe("fp8-adam").moment("exp_avg")),)
    recipe = halfstep.Recipe(name="kept", summary="", source="", moments=moments)
    model, optimizer, _ = halfstep.prepare(model, rule(model.parameters(), lr=1e-6), recipe)
    for step in range(3):
        model.weight.grad = torch.full((8, 512), 1e-3)
        if step == 1:
            model.weight.grad[1, 3] = torch.nan
        optimizer.step()
    assert int(model.weight.isnan().sum()) == 1
    assert all(not state.isnan().any() for state in optimizer.state[model.weight].values())
