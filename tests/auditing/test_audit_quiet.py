"""Healthy setups, for which neither `audit` nor `apply` warns. New findings must pass them all."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfstep
from families import for_each
from tiny import adamw, assert_same


class Rotary(nn.Module):
    """A Transformer with typical buffers: frequencies, tables, masks, positions, slopes."""

    def __init__(self, seed=0):
        super().__init__()
        torch.default_generator.manual_seed(seed)
        self.embed = nn.Embedding(64, 32)
        self.attn = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 64)
        inv_freq = 1.0 / 10000 ** (torch.arange(0, 64, 2) / 64)
        angles = torch.outer(torch.arange(64.0), inv_freq)
        for name, value in {
            "inv_freq": inv_freq,
            "cos": angles.cos(),
            "position_ids": torch.arange(512.0),
            "causal": torch.full((64, 64), torch.finfo(torch.float32).min).triu(1),
            "infinite": torch.full((64, 64), -math.inf).triu(1),
            "slopes": 2.0 ** -torch.arange(1, 9),
            "alibi": (2.0 ** -torch.arange(1, 9))[:, None] * torch.arange(256),
            "pixels": torch.arange(256) / 256,
            "kernel": torch.tensor([1.0, 4, 6, 4, 1]) / 16,
            "mean": torch.tensor([0.5, 0.25, 0.75]),
            "scale": torch.tensor(1.1).bfloat16().float(),
            "codebook": torch.arange(256, dtype=torch.uint8)[:126].view(torch.float8_e4m3fn).float(),
        }.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.mlp(self.norm(x + self.attn(x))))


TOKENS = torch.arange(64)


def stepped(model, optimizer, steps=2, autocast=False):
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(TOKENS), TOKENS)
        loss.backward()
        optimizer.step()
    return model, optimizer


def fresh():
    model = Rotary()
    return model, adamw(model)


def trained():
    return stepped(*fresh())


def under_autocast():
    return stepped(*fresh(), steps=1, autocast=True)


def accumulated():
    model, optimizer = fresh()
    for tokens in TOKENS.chunk(4):
        F.cross_entropy(model(tokens), tokens).backward()
    return model, optimizer


def zeroed():
    model, optimizer = trained()
    optimizer.zero_grad(set_to_none=False)
    return model, optimizer


def zeroed_without_moments():
    model = Rotary()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    stepped(model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    return model, optimizer


def warming_up():
    model, optimizer = fresh()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 1e9)
    return stepped(model, optimizer)


def at_the_end_of_a_cosine():
    model, optimizer = trained()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    return model, optimizer


def tied():
    model = Rotary()
    model.head.weight = model.embed.weight
    return stepped(model, adamw(model), autocast=True)


class Lora(nn.Module):
    """A LoRA layer whose B starts at zero, so that A's first gradient is zero."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


def lora(dtype=torch.float32, steps=1):
    model = Rotary().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.attn, model.mlp[0] = Lora(model.attn), Lora(model.mlp[0])
    for layer in (model.attn, model.mlp[0]):
        layer.lora_A.float(), layer.lora_B.float()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return stepped(model, optimizer, steps, autocast=True)


def lora_beside_bf16():
    return lora(torch.bfloat16)


def qlora():
    """Codes of a quantized base with 16-bit scales, as GPTQ's layers keep them."""
    model, optimizer = fresh()
    model.base = nn.Module()
    model.base.register_buffer("qweight", torch.randint(0, 1 << 30, (8, 32), dtype=torch.int32))
    model.base.register_buffer("scale_of_rows", torch.rand(32).half())
    return model, optimizer


def head_only():
    model = Rotary().requires_grad_(False)
    model.head.requires_grad_()
    return stepped(model, adamw(model.head))


def biases_only():
    model = Rotary()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return stepped(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))


def convolutional(frozen):
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    optimizer = adamw(model)
    model[1].eval().requires_grad_(not frozen)
    model(torch.randn(4, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def frozen_batch_norm():
    return convolutional(frozen=True)


def batch_norm():
    return convolutional(frozen=False)


class FrozenBatchNorm(nn.Module):
    """Batch norm with all parameters in buffers, as torchvision's."""

    def __init__(self):
        super().__init__()
        for name, value in (("weight", torch.rand(8)), ("running_mean", torch.rand(8)), ("running_var", torch.ones(8))):
            self.register_buffer(name, value)


def frozen_batch_norm_of_buffers():
    model, _ = convolutional(frozen=True)
    model[1] = FrozenBatchNorm()
    return model, adamw(model)


class Experts(Rotary):
    """Two experts, where all tokens go to the first."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = torch.zeros(len(x), 2)
        mask[:, 0] = 1
        return self.head(self.norm(sum(mask[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))))


def unused_experts():
    model = Experts()
    for name in ("attn", "mlp"):
        delattr(model, name)
    return stepped(model, adamw(model))


def target_network():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.online = Rotary()
            self.target = copy.deepcopy(self.online).requires_grad_(False)

        def forward(self, tokens):
            return self.online(tokens)

    model = Both()
    optimizer = adamw(model.online)
    stepped(model, optimizer)
    with torch.no_grad():
        for target, online in zip(model.target.parameters(), model.online.parameters(), strict=True):
            target.lerp_(online, 0.005)
    return model, optimizer


def averaged():
    model, _ = trained()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    average.update_parameters(model)
    return average, None


def averaged_in_bf16():
    return AveragedModel(Rotary().bfloat16(), multi_avg_fn=get_ema_multi_avg_fn(0.99)), None


def bf16_moments():
    """bf16 second moments at a beta2 that bf16 can represent, with float32 weights."""
    model, optimizer = trained()
    for group in optimizer.param_groups:
        group["betas"] = (0.9, 0.95)
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
    return model, optimizer


def from_a_bf16_checkpoint():
    """Float32 weights and running statistics loaded from a 16-bit file."""
    model, _ = batch_norm()
    model[1].running_mean.normal_()
    model.load_state_dict({key: value.bfloat16() for key, value in model.state_dict().items()})
    return model, adamw(model)


def frozen_weights_only():
    return Rotary().requires_grad_(False), None


def in_16_bits():
    """All parameters in bf16 and frequencies in float32, as transformers loads models."""
    model = Rotary()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model, None


def zero_learning_rate():
    model = Rotary()
    groups = [{"params": model.embed.parameters(), "lr": 0.0}]
    groups.append({"params": [p for name, p in model.named_parameters() if not name.startswith("embed")]})
    return stepped(model, torch.optim.AdamW(groups, lr=1e-3))


def rms_norms():
    model = Rotary()
    model.norm = nn.RMSNorm(32)
    return stepped(model, adamw(model))


def router_in_float32():
    model = Rotary()
    model.router = nn.Linear(32, 4)
    old = model.forward

    def forward(tokens):
        with torch.autocast("cpu", enabled=False):
            routed = model.router(model.embed(tokens)).softmax(-1).sum(-1, keepdim=True)
        return old(tokens) * routed

    model.forward = forward
    return stepped(model, adamw(model), steps=1, autocast=True)


def spectral_norm():
    model = Rotary()
    nn.utils.parametrizations.spectral_norm(model.attn)
    return stepped(model, adamw(model))


def cached_keys():
    model, optimizer = trained()
    model.register_buffer("keys", torch.zeros(1, 8, 64, 16, dtype=torch.bfloat16), persistent=False)
    return model, optimizer


SETUPS = {
    made.__name__: made
    for made in (
        fresh, trained, under_autocast, accumulated, zeroed, zeroed_without_moments, warming_up, at_the_end_of_a_cosine,
        tied, lora, lora_beside_bf16, qlora, head_only, biases_only, batch_norm, frozen_batch_norm,
        frozen_batch_norm_of_buffers, unused_experts, target_network, averaged, averaged_in_bf16,
        bf16_moments, from_a_bf16_checkpoint, frozen_weights_only, in_16_bits, zero_learning_rate,
        rms_norms, router_in_float32, cached_keys, spectral_norm,
    )
}  # fmt: skip


NOTED = {
    "zeroed": {"gradients are zero"},
    "zeroed_without_moments": {"gradients are zero"},
    "tied": {"shared"},
    "from_a_bf16_checkpoint": {"started narrow"},  # statistics off by less than bf16 inputs are
    "bf16_moments": set(),
    "averaged_in_bf16": {"rounded buffers"},
    "router_in_float32": {"outside autocast"},
}
"""The notes of setups that may be intended; the other setups have no finding."""


@for_each(
    "name", SETUPS, fast=[*NOTED, "fresh", "trained", "warming_up", "lora", "qlora", "batch_norm", "unused_experts"]
)
def test_healthy_setups_give_no_warnings(name):
    model, optimizer = SETUPS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = halfstep.audit(model, optimizer)
    assert found.warnings == ()
    assert_same(dict(model.state_dict()), before)
    assert {one.what for one in found.findings} == NOTED.get(name, set())


@for_each("name", SETUPS)
def test_apply_gives_no_warnings_for_healthy_buffers(name):
    for recipe in ("bf16-mixed", "bf16-master"):
        model, _ = SETUPS[name]()
        if all(p.dtype == torch.float32 for p in model.parameters()):
            halfstep.apply(model, recipe)  # warnings are errors here
