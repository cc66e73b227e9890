"""Setups whose updates are lost are found; healthy variants of each give no finding."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfstep
from tiny import adamw, prepared


TOKENS = torch.arange(64)


class Block(nn.Module):
    """A residual block; `wide` runs it outside autocast."""

    def __init__(self, wide=False):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.wide = wide

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.is_autocast_enabled("cpu") and not self.wide):
            return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, two blocks, a norm and a head."""

    def __init__(self, wide=False):
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([Block(), Block(wide)])
        self.norm = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, 64)

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def stepped(model, optimizer, scale=1.0, steps=2, autocast=False):
    """Train for `steps`; leaves the last gradients in place."""
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(TOKENS).float(), TOKENS)
        (scale * loss).backward()
        optimizer.step()
    return model, optimizer


def finding(what, *setup):
    """The only finding named `what`, or None."""
    found = [one for one in halfstep.audit(*setup).findings if one.what == what]
    assert len(found) <= 1
    return found[0] if found else None


def moments(dtype, beta2=0.999):
    """AdamW with its second moments cast to `dtype` after a step."""
    model = Net()
    model, optimizer = stepped(model, adamw(model, betas=(0.9, beta2)))
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].to(dtype)
    return model, optimizer


def half(size):
    """A model in fp16 after a step on gradients of magnitude `size`."""
    model = Net().half()
    optimizer = adamw(model, eps=1e-4)
    for parameter in model.parameters():
        parameter.grad = (size * torch.randn(parameter.shape)).half()
    optimizer.step()
    return model, optimizer


def test_underflowed_second_moments_are_found():
    model, optimizer = half(1e-4)
    gone = finding("second moments vanished", model, optimizer)
    assert (gone.level, gone.tensors) == ("warning", tuple(dict(model.named_parameters())))
    assert not any(optimizer.state[p]["exp_avg_sq"].any() for p in model.parameters())
    assert "in float16 that are zero where the gradients were not, 100% of them" in gone.text
    assert finding("second moments vanished", *half(1e-1)) is None
    assert finding("second moments vanished", model, adamw(model)) is None  # nothing was stepped yet
    model, optimizer = half(6e-3)
    shares = {
        name: 1 - (optimizer.state[p]["exp_avg_sq"] != 0).sum() / (optimizer.state[p]["exp_avg"] != 0).sum()
        for name, p in model.named_parameters()
    }
    found = finding("second moments vanished", model, optimizer)
    assert (found.tensors if found else ()) == tuple(name for name, share in shares.items() if share > 0.5)


def test_unused_expert_with_zero_moments_gives_no_warning():
    model = Net()
    model.blocks[1].register_forward_hook(lambda block, args, output: args[0] + 0 * output)
    model, optimizer = stepped(model, adamw(model))
    assert not optimizer.state[model.blocks[1].up.weight]["exp_avg"].any()
    assert halfstep.audit(model, optimizer).warnings == ()


@pytest.mark.quick("dtype0-0.999-True", "dtype2-0.999-False")
@pytest.mark.parametrize(
    ("dtype", "beta2", "still"),
    [
        (torch.bfloat16, 0.999, True),
        (torch.bfloat16, 0.95, False),
        (torch.float16, 0.999, False),
        (torch.float16, 0.9999, True),
    ],
)
def test_second_moments_that_cannot_decay_are_found(dtype, beta2, still):
    """If beta2 times every value of the dtype rounds back to that value, the audit must say so, else not."""
    every = torch.linspace(1, 2, 1 + 2**10).to(dtype)
    assert torch.equal((every.double() * beta2).to(dtype), every) == still
    found = finding("average stands still", *moments(dtype, beta2))
    assert (found is not None) == still
    if still:
        assert found.level == "warning"
        assert f"averages (exp_avg_sq) in {str(dtype)[6:]} that cannot decay: {beta2:g} times a value" in found.text
        assert f"{1 - beta2:.1g} is below" in found.text
        assert len(found.tensors) == len([*Net().parameters()])


@pytest.mark.parametrize(("name", "still"), [("bf16-pure", True), ("bf16-collage-plus", False)])
def test_finding_for_second_moments_of_recipes(name, still):
    """Collage-plus stores the rounding error of the second moment beside it."""
    model, optimizer, scaler = prepared(name, Net(), None)
    stepped(model, optimizer)
    assert (finding("average stands still", model, optimizer, scaler) is not None) == still


def ema(decay, dtype):
    return AveragedModel(Net().to(dtype), multi_avg_fn=get_ema_multi_avg_fn(decay))


class Averaged(nn.Module):
    """A weight average as timm, diffusers and others write it."""

    def __init__(self, decay, dtype):
        super().__init__()
        self.module, self.decay = Net().to(dtype).requires_grad_(False), decay


@pytest.mark.parametrize("average", [ema, Averaged])
def test_weight_averages_that_cannot_decay_are_found(average):
    found = finding("average stands still", average(0.9999, torch.bfloat16))
    assert found.level == "warning"
    assert "averages of weights or activations in bfloat16 that cannot decay: 0.9999 times" in found.text
    assert "0.0001 is below 2^-9" in found.text
    assert len(found.tensors) == len([*Net().parameters()])
    for decay, dtype in ((0.9999, torch.float32), (0.99, torch.bfloat16)):
        assert halfstep.audit(average(decay, dtype)).findings == ()


def test_16_bit_running_statistics_that_cannot_decay_are_found():
    for momentum, still in ((0.1, False), (0.001, True), (None, False)):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=momentum)).bfloat16()
        found = finding("average stands still", model)
        assert (found.tensors if found else None) == (("1.running_mean", "1.running_var") if still else None)


@pytest.mark.parametrize("lr", [1e-3, 1e-10, 3e-9])
def test_learning_rate_below_float32_resolution_is_found(lr):
    model = Net()
    found = finding("learning rate too small", model, adamw(model, lr=lr))
    lost = {}
    for name, parameter in model.named_parameters():
        w = parameter.detach()
        step = torch.tensor(lr, dtype=torch.float64)
        kept = ((w.double() + step).float() == w) & ((w.double() - step).float() == w)
        lost[name] = kept[w != 0].double().mean().item() if w.any() else 0.0
    expected = tuple(name for name, share in lost.items() if share > 0.5)
    assert (found.tensors if found else ()) == expected
    if found:
        assert found.level == "warning"
        assert f"lr = {lr:g} (Adam's size)" in found.text
        assert "norm 100%" in found.text


def test_warmup_schedule_gives_no_finding():
    model = Net()
    optimizer = adamw(model, lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-9)
    assert halfstep.audit(model, optimizer).findings == ()


def test_learning_rate_too_small_for_masters_is_found():
    model, optimizer, _ = prepared("bf16-master", Net(), None)
    assert finding("learning rate too small", model, optimizer) is None
    optimizer.param_groups[0]["lr"] = 1e-9
    assert "norm.weight" in finding("learning rate too small", model, optimizer).tensors


def test_all_zero_gradients_are_found():
    model = Net()
    optimizer = adamw(model)
    (0 * model(TOKENS).sum()).backward()
    count = sum(p.numel() for p in model.parameters())
    found = finding("gradients are zero", model, optimizer)
    assert (found.level, f"all {count:,} values, and none was another" in found.text) == ("warning", True)
    optimizer.step()
    assert finding("gradients are zero", model, optimizer).level == "warning"
    stepped(model, optimizer)
    assert finding("gradients are zero", model, optimizer) is None
    optimizer.zero_grad(set_to_none=False)
    assert "set_to_none" in finding("gradients are zero", model, optimizer).text
    assert halfstep.audit(model, optimizer).warnings == ()


def test_tiny_loss_scale_is_found():
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=5e-7)
    found = finding("loss scale too small", model, None, scaler)
    assert (found.level, "5.0e-07, below 1e-06" in found.text) == ("warning", True)
    assert "(0)" not in str(found)
    for scale in (1.0, 2e-6, 65536.0):
        assert halfstep.audit(model, None, torch.amp.GradScaler("cpu", init_scale=scale)).findings == ()


def test_block_outside_autocast_is_noted():
    model = Net(wide=True)
    model, optimizer = stepped(model, adamw(model), steps=1, autocast=True)
    found = finding("outside autocast", model, optimizer)
    assert (found.level, found.tensors) == ("note", ("blocks.1.up.weight", "blocks.1.down.weight"))
    assert "those of 3 others are exactly bf16" in found.text
    for autocast in (True, False):
        model = Net()
        assert halfstep.audit(*stepped(model, adamw(model), steps=1, autocast=autocast)).findings == ()
    model = Net()
    model.lm_head.weight = model.wte.weight  # a sum of two gradients
    assert finding("outside autocast", *stepped(model, adamw(model), steps=1, autocast=True)) is None


def test_frozen_norm_in_trained_block_is_noted():
    model = Net()
    model.blocks[1].norm.requires_grad_(False)
    found = finding("frozen norm", model, adamw(model))
    assert (found.level, found.tensors) == ("note", ("blocks.1.norm.weight", "blocks.1.norm.bias"))
    model.blocks[1].requires_grad_(False)  # with its block
    assert finding("frozen norm", model, adamw(model)) is None
    frozen = copy.deepcopy(model).requires_grad_(False)
    frozen.lm_head.requires_grad_()  # features are extracted
    assert halfstep.audit(frozen).findings == ()
    model = Net()
    for layer in (layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)):
        layer.bias = None  # so that of a block in codes the norms alone are frozen parameters
    halfstep.quantize_model(model, "nf4", adapters=True)
    for block in model.blocks:
        block.lora_A = torch.nn.Linear(8, 2)  # trains beside the codes of a base whose norms do not
    assert not any(parameter.requires_grad for parameter in model.blocks[0].norm.parameters())
    assert finding("frozen norm", model, adamw(model)) is None
