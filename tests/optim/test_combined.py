"""`Combined` optimizers and Muon: equal to torch's, resumed, with low-bit states, and what is refused."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import OptimizerError
from halfstep.kernels.gpu import optimizer as on_gpu
from halfstep.ops import quantize
from halfstep.optim import Combined, convert
from halfstep.optim.stepping import StepPlan
from halfstep.recipe import get_recipe
from tiny import assert_same, mlp, train


pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 brings Muon")
OPTIONS = [
    {},
    {"nesterov": False, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.5, "lr": 0.02},
    {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3, "adjust_lr_fn": "original"},
]


def parts(model, **options):
    matrices, others = ([p for p in model.parameters() if (p.dim() == 2) is those] for those in (True, False))
    return torch.optim.Muon(matrices, **{"lr": 0.02, **options}), torch.optim.AdamW(others, lr=1e-2)


def wide():
    """A model with matrices large enough to have coded moments."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 640), nn.GELU(), nn.Linear(640, 4))


def combined(model, recipe="fp32", **options):
    return halfstep.prepare(model, Combined(*parts(model, **options)), recipe, generator=3)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_muon_equals_torchs_bit_for_bit(options):
    torch.manual_seed(0)
    first = [nn.Parameter(torch.randn(shape)) for shape in ((5, 3), (3, 7), (64, 32), (0, 3))]
    second = [nn.Parameter(p.detach().clone()) for p in first]
    theirs, ours = torch.optim.Muon(first, **options), torch.optim.Muon(second, **options)
    for step in range(12):
        if step == 4:  # convert takes over the states
            ours = convert(ours, get_recipe("fp32"), {})
        for p, q in zip(first, second, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        theirs.step()
        ours.step()
    assert_same(second, first)
    buffers = [
        [optimizer.state[p]["momentum_buffer"] for p in ps] for optimizer, ps in ((theirs, first), (ours, second))
    ]
    assert_same(buffers[1], buffers[0])


def test_an_8_bit_momentum_equals_torchs_rounded_after_each_step():
    torch.manual_seed(0)
    first = nn.Parameter(torch.randn(96, 64))
    second = nn.Parameter(first.detach().clone())
    theirs = torch.optim.Muon([first])
    ours = convert(torch.optim.Muon([second]), get_recipe("adamw-8bit"), {})
    kept = get_recipe("adamw-8bit").moment("exp_avg", first.numel())
    for _ in range(5):
        first.grad = torch.randn(first.shape)
        second.grad = first.grad.clone()
        theirs.step()
        buffer = theirs.state[first]["momentum_buffer"]
        buffer.copy_(quantize(buffer.view(1, -1), kept.quantizer).dequantize().view_as(buffer))
        ours.step()
    assert_same(second.detach(), first.detach())
    assert ours.state[second]["momentum_buffer"].dtype == torch.uint8


def test_each_group_is_updated_by_its_own_rule():
    model, twin = mlp(), mlp()
    stock = parts(twin)
    optimizers = parts(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5)
    other = torch.optim.lr_scheduler.StepLR(stock[0], 2, 0.5)
    model, optimizer, _ = halfstep.prepare(model, Combined(*optimizers), "fp32")
    for _ in range(6):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        for each in (optimizer, *stock, schedule, other):
            each.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0.0 if p.dim() == 2 else 1e-6)
    assert "Muon, one of those combined" in str(halfstep.plan_of(model))


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "adamw-8bit"])
def test_resumed_and_copied_optimizers_give_the_same_bits(recipe):
    whole = combined(wide(), recipe)
    train(*whole, 3)
    saved = copy.deepcopy([part.state_dict() for part in whole])
    twin = copy.deepcopy(whole[:2])
    train(*whole, 3)
    second = combined(wide(), recipe)
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    train(*second, 3)
    train(*twin, halfstep.LossScaler(), 3)
    assert_same(dict(second[0].state_dict()), dict(whole[0].state_dict()))
    assert_same(dict(twin[0].state_dict()), dict(whole[0].state_dict()))
    assert pickle.loads(pickle.dumps(whole[1])).rule.parts == whole[1].rule.parts


def test_states_of_other_update_rules_are_refused():
    _model, optimizer, _ = combined(mlp())
    saved = optimizer.state_dict()
    saved["param_groups"][0]["update_rule"] = "sgd"
    with pytest.raises(OptimizerError, match="a parameter group that sgd updated, and here muon does"):
        optimizer.load_state_dict(saved)
    saved["param_groups"][0]["update_rule"] = "muon"
    optimizer.param_groups[0]["update_rule"] = "mouon"
    with pytest.raises(OptimizerError, match="update_rule = 'mouon'; expected one of 'muon', 'adamw'"):
        optimizer.step()


def test_a_new_group_must_name_its_rule_and_all_options():
    _model, optimizer, _ = combined(mlp())
    new = nn.Parameter(torch.ones(3))
    with pytest.raises(OptimizerError, match=r"update_rule = None; expected one of"):
        optimizer.add_param_group({"params": [new], "lr": 0.1})
    with pytest.raises(OptimizerError, match=r"group of adamw lacks betas, eps, .*give all of its options"):
        optimizer.add_param_group({"params": [new], "lr": 0.1, "update_rule": "adamw"})
    assert len(optimizer.param_groups) == 2
    options = {name: value for name, value in optimizer.param_groups[1].items() if name != "params"}
    optimizer.add_param_group({"params": [new], **options})
    new.grad = torch.ones(3)
    optimizer.step()
    assert (new < 1).all()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"params": [nn.Parameter(torch.ones(2, 2, 2))]},
            r"shape \(2, 2, 2\); expected 2 dim.*Combined\(torch.optim.Muon",
        ),
        (
            {"adjust_lr_fn": "spectral"},
            "adjust_lr_fn = 'spectral' given; expected None, 'original' or 'match_rms_adamw'",
        ),
        ({"ns_steps": 100}, "ns_steps = 100 given; expected three numbers, and fewer than 100 steps"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients = \(1.0, 2.0\)"),
    ],
)
def test_unsupported_parameters_and_options_of_muon_are_refused(change, why):
    optimizer = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])
    optimizer.param_groups[0].update(change)
    with pytest.raises(OptimizerError, match=why):
        convert(optimizer, get_recipe("fp32"), {})


def test_invalid_uses_of_combined_are_refused():
    parameter = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(OptimizerError, match="was given no optimizer"):
        Combined()
    with pytest.raises(OptimizerError, match=r"shape \(2, 2\) is in both Muon and AdamW"):
        Combined(torch.optim.Muon([parameter]), torch.optim.AdamW([parameter]))
    with pytest.raises(OptimizerError, match=r"LBFGS cannot be expressed"):
        Combined(torch.optim.LBFGS([parameter]))
    with pytest.raises(OptimizerError, match=r"list cannot be expressed.*halfstep\.optim\.Combined"):
        halfstep.prepare(nn.ParameterList([parameter]), [torch.optim.Muon([parameter])], "fp32")
    both = Combined(torch.optim.Muon([parameter]))
    with pytest.raises(OptimizerError, match=r"hand it to halfstep\.prepare"):
        both.step()
    halfstep.prepare(nn.ParameterList([parameter]), both, "fp32")
    with pytest.raises(OptimizerError, match="this Muon was handed to halfstep"):
        both.optimizers[0].step()


def test_muon_with_galore_is_refused():
    with pytest.raises(OptimizerError, match=r"a projection of muon.*Expected Adagrad, Adam"):
        combined(wide(), "galore")


def test_on_a_gpu_only_groups_with_kernels_are_launched(monkeypatch):
    """Launches are recorded, not run: AdamW's is, and Muon is stepped by torch."""
    made = []
    made_up = SimpleNamespace(prepare="prepare", update="update", made=lambda source, *program: id(program))
    monkeypatch.setattr(on_gpu, "functions", lambda name: made_up)
    monkeypatch.setattr(on_gpu, "prepared", lambda kernel, *_, **__: lambda grid, *rest: made.append((kernel, grid)))
    model, optimizer, _ = combined(nn.Linear(8, 2000))
    optimizer._together = StepPlan(anywhere=True)
    before = copy.deepcopy(list(model.parameters()))
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert made == [("prepare", 1), ("update", 2)] * 2
    assert [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)] == [True, False]
