"""Checks of bf16 training: statements of a forum's thread, and Collage, Kahan summation and stochastic rounding."""

from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn

from halfstep import formats, prepare
from halfstep.claims.checks.base import Check, Numbers, check, grad_dtype, normal, one_weight, stepped, update
from halfstep.memory import measure
from halfstep.quant.masters import get_master
from halfstep.tracking import Arrival, arrivals, share_lost, share_zeroed


def bytes_per_parameter(recipe: str) -> float:
    """Measured on the live tensors of a linear layer under AdamW, before its second step."""
    model: nn.Module = nn.Linear(64, 64)
    model, optimizer, scaler = prepare(model, torch.optim.AdamW(model.parameters()), recipe, generator=0)
    for step in range(2):
        scaler.scale(model(torch.ones(4, 64, dtype=torch.float32, device="cpu")).square().mean()).backward()
        if step == 0:
            update(optimizer, scaler)
    return measure(model, optimizer).total


def weights(count: int) -> Tensor:
    """Weights with a transformer's initial distribution: N(0, 0.02)."""
    return normal(count) * 0.02


def descent(recipe: str, lr: float, steps: int = 5) -> Arrival:
    """The arrival of AdamW's update of N(0, 0.02) weights, at the last of `steps` steps with N(0, 1) gradients."""
    weight, optimizer = one_weight(recipe, weights(20_000), partial(torch.optim.AdamW, lr=lr, weight_decay=0.0))
    generator, found = torch.Generator().manual_seed(1), Arrival()
    for _ in range(steps):
        grad = torch.randn(weight.shape, generator=generator, dtype=torch.float32, device="cpu")
        weight.grad = grad.to(grad_dtype(recipe))
        with arrivals(optimizer, {weight: "weight"}) as arrived:
            optimizer.step()
        found = arrived.model
    return found


def _bytes_of(name: str, **recipes: str) -> Check:
    """A check of the bytes per parameter of recipes, by the names that the ledger's row gives these figures."""
    return Check(name, lambda: {number: bytes_per_parameter(recipe) for number, recipe in recipes.items()})


bytes_of_recipes = _bytes_of(
    "forum-bytes", bf16_master="bf16-master", bf16_fp32grad="bf16-fp32grad", bf16_nomaster="bf16-nomaster"
)
"""The three options of the question."""
correction = _bytes_of("forum-correction", asked="bf16-fp32grad", answered="bf16-master")
"""The second option as asked, and with the master copy that the reply adds."""
megatron = _bytes_of("forum-megatron", megatron="bf16-megatron")
"""bf16 weights with an fp32 master and gradients accumulated in fp32."""
adam_bytes = _bytes_of("slides-adam-bytes", fp16_mixed="fp16-mixed", bf16_mixed="bf16-mixed")
"""fp32 weights without a separate master, under torch.autocast."""


@check("forum-descent")
def skipped_master() -> Numbers:
    """Descent quality and the share of lost updates at three learning rates, with a master copy and without."""
    found: Numbers = {}
    for short, lr in (("4", 1e-4), ("5", 1e-5), ("6", 1e-6)):
        plain, master = descent("bf16-nomaster", lr), descent("bf16-master", lr)
        found |= {
            f"quality_{short}": plain.quality or 0.0,
            f"lost_{short}": plain.lost_share or 0.0,
            f"master_{short}": master.quality or 0.0,
        }
    return found


@check("forum-zeroed")
def zeroed() -> Numbers:
    """The share of 10^7 weights N(0, 0.02) that a cast makes zero, and of updates of 1e-5 that bf16 loses."""
    stored = weights(10_000_000)
    return {
        "bf16": share_zeroed([stored], formats.get("bf16")),
        "fp16": share_zeroed([stored], formats.get("fp16")),
        "updates": share_lost([(stored, stored - 1e-5)], formats.get("bf16")),
    }


def _walk(kind: str | None, start: float, update: float, times: int) -> tuple[float, float]:
    """The weight, and the sum of everything stored of it, after that many updates."""
    master, weight = get_master(kind), torch.empty(1, dtype=torch.bfloat16, device="cpu")
    kept = master.start(weight, torch.full((1,), start, dtype=torch.float32, device="cpu"))
    for _ in range(times):
        master.write(weight, kept, master.read(weight, kept) + update)
    return weight.item(), master.value(weight, kept).item()


@check("collage-quality")
def quality() -> Numbers:
    """Descent quality of both forms of Collage at three learning rates, compared with bf16 alone."""
    return {
        f"{recipe.rpartition('-')[2]}_{rate}": descent(recipe, lr).quality or 0.0
        for recipe in ("bf16-collage-light", "bf16-collage-plus", "bf16-pure")
        for rate, lr in {"3": 1e-3, "4": 1e-4, "6": 1e-6}.items()
    }


@check("collage-bytes")
def bytes_of_collage() -> Numbers:
    """Bytes a parameter, measured on live tensors."""
    recipes = {"light": "bf16-collage-light", "plus": "bf16-collage-plus", "master": "bf16-master"}
    found = {short: bytes_per_parameter(recipe) for short, recipe in recipes.items()}
    return {
        **found,
        "light_less": 1 - found["light"] / found["master"],
        "plus_less": 1 - found["plus"] / found["master"],
    }


@check("collage-second-moment")
def second_moment() -> Numbers:
    """Adam's v under a constant gradient of 0.5 and beta2 = 0.999 after 8000 steps, relative to its limit of 0.25."""
    found: Numbers = {}
    for recipe in ("bf16-collage-light", "bf16-collage-plus"):
        weight, optimizer = stepped(recipe, 4, partial(torch.optim.AdamW, lr=0.0), 0.5, 8000)
        state = optimizer.state[weight]
        rest: Tensor = state.get("exp_avg_sq_residual", torch.zeros(4, dtype=torch.float32, device="cpu"))
        found[recipe.rpartition("-")[2]] = float((state["exp_avg_sq"].float() + rest.float()).mean() / 0.25)
    return found


def _fitted(recipe: str, beta2: float, seed: int) -> float:
    """The loss of a small regression after 800 steps of AdamW, with a learning rate that falls from 3e-3 along a
    cosine."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    x = torch.randn(2048, 16, generator=generator, dtype=torch.float32, device="cpu")
    first, second = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in ((16, 32), (32, 4))
    )
    y = torch.tanh(x @ first / 4) @ second / 5
    stock = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, beta2), weight_decay=0.0)
    model, optimizer, scaler = prepare(model, stock, recipe, generator=seed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 800)
    for _ in range(800):
        rows = torch.randint(len(x), (64,), generator=generator, dtype=torch.int64, device="cpu")
        scaler.scale(nn.functional.mse_loss(model(x[rows]), y[rows])).backward()  # type: ignore[no-untyped-call]
        update(optimizer, scaler)
        schedule.step()
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(x), y))


@check("collage-beta2")
def both_betas() -> Numbers:
    """The gap of both forms of Collage to fp32's loss with the same seed, by beta2: mean, smallest and largest over
    three seeds."""
    found: Numbers = {}
    for name, beta2 in (("95", 0.95), ("999", 0.999)):
        fp32 = [_fitted("fp32", beta2, seed) for seed in range(3)]
        for form in ("light", "plus"):
            fits = [_fitted(f"bf16-collage-{form}", beta2, seed) for seed in range(3)]
            gaps = [fit / exact - 1 for fit, exact in zip(fits, fp32, strict=True)]
            found |= {
                f"{form}_{name}": fmean(gaps),
                f"{form}_{name}_least": min(gaps),
                f"{form}_{name}_most": max(gaps),
            }
    return found


@check("zamirai-walk")
def walk() -> Numbers:
    """The weight after 2000 updates of -1e-4 from 1: rounded to nearest, stochastically, and with Kahan's
    compensation."""
    weight, _ = stepped("bf16-stochastic", 10_000, partial(torch.optim.SGD, lr=1e-4), 1.0, 2000)
    ends = weight.detach().double()
    kahan, both = _walk("kahan", 1.0, -1e-4, 2000)
    return {
        "nearest": _walk(None, 1.0, -1e-4, 2000)[0],
        "stochastic": float(ends.mean()),
        "spread": float(ends.std()),
        "kahan": kahan,
        "kahan_both": both,
    }


@check("kahan-sum")
def kahan_sum() -> Numbers:
    """The sum of 10^5 terms bf16(1e-3), exactly 99.95: rounded to nearest, and with a compensation in bf16."""
    term = torch.tensor(1e-3, dtype=torch.float32, device="cpu").bfloat16().item()
    kahan, both = _walk("kahan", 0.0, term, 100_000)
    return {"exact": 100_000 * term, "nearest": _walk(None, 0.0, term, 100_000)[0], "kahan": kahan, "kahan_both": both}


@check("anyprecision-variance")
def variance() -> Numbers:
    """3000 steps of v <- 0.999 v from 1, and of a mean that should rise to 0.5, in bf16."""
    v, rising = torch.ones(2, 1, dtype=torch.bfloat16, device="cpu")
    for _ in range(3000):
        v.mul_(0.999)
        rising.mul_(0.999).add_(0.5 * 0.001)
    return {"decayed": v.item(), "towards_half": rising.item(), "exact": 0.999**3000}


@check("anyprecision-decay")
def decay() -> Numbers:
    """1000 steps of weight decay alone, lr * decay = 1e-4: as the source applies it to a bf16 weight, and by our
    recipe's update."""
    plain = torch.ones(1, dtype=torch.bfloat16, device="cpu")
    for _ in range(1000):
        plain.mul_(1 - 1e-4)
    weight, optimizer = stepped("bf16-kahan", 1, partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1), 0.0, 1000)
    stored = get_master(optimizer.recipe.master).value(weight.detach(), optimizer.state[weight])
    return {"theirs": plain.item(), "ours": weight.item(), "ours_both": stored.item(), "exact": (1 - 1e-4) ** 1000}
