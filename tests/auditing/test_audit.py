"""`audit` of known setups: effective precision found by bits, byte counts equal to the storages'."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.memory import measure
from halfstep.ops import CodeTensor
from halfstep.recipe import get_recipe
from tiny import RECIPES, adamw, assert_same, batch, mlp, mostly_slow, prepared, train


class Net(nn.Module):
    """A model whose tensors have enough values for the bits to be evidence, with names that give their roles."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.wte = nn.Embedding(64, 32)
        self.mlp = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.norm(self.mlp(self.wte(tokens))))


TOKENS = torch.arange(64)


def stepped(model, optimizer, steps=3):
    """Train for `steps`; leaves the last gradients in place."""
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(TOKENS), TOKENS).backward()
        optimizer.step()
    return model, optimizer


def found(report):
    """The report's findings by their `what`; each occurs once."""
    assert len({one.what for one in report.findings}) == len(report.findings)
    return {one.what: one for one in report.findings}


def kinds(report):
    """The set of (stored dtype, effective precision) per kind, for rows whose bits are evidence."""
    said = {}
    for row in report.rows:
        if row.effective not in ("unknown", None) and row.kind != "step":
            said.setdefault(row.kind, set()).add((row.dtype, row.effective))
    return said


def storages(model, optimizer):
    """The bytes of all storages, counted without the audit."""
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    tensors = [part for t in tensors for part in (t.parts.values() if isinstance(t, CodeTensor) else [t])]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


FULL = {("float32", "full")}


def test_float32_training_is_full_precision_without_findings():
    model = Net()
    model, optimizer = stepped(model, adamw(model))
    report = halfstep.audit(model, optimizer)
    assert kinds(report) == dict.fromkeys(("parameters", "gradients", "exp_avg", "exp_avg_sq"), FULL)
    assert report.findings == ()
    assert report.steps == (3, 3)
    assert report.trained == sum(p.numel() for p in model.parameters())


@pytest.mark.quick("fp32", "fp8lm-o3", "fp4-wang")
@pytest.mark.parametrize("name", mostly_slow(RECIPES))
def test_every_recipe_has_its_dtypes_and_bytes_equal_the_storages(name):
    recipe = get_recipe(name)
    model, optimizer, scaler = prepared(name)
    train(model, optimizer, scaler)
    scaler.scale(F.mse_loss(model(batch()[0]), batch()[1])).backward()
    report = halfstep.audit(model, optimizer, scaler)
    assert report.nbytes == report.held == storages(model, optimizer)
    assert report.loss_scale == scaler.get_scale()
    assert report.trained == sum(p.numel() for p in model.parameters())
    if recipe.codes is None:
        size, roles = measure(model, optimizer), {"weights": 0, "grads": 0, "master": 0, "states": 0}
        for row in report.rows:
            place = {"parameters": "weights", "gradients": "grads"}.get(row.kind, row.kind.partition(" ")[0])
            if row.kind != "step" and row.kind not in ("buffers", "scales"):
                roles[place if place in roles else "states"] += row.nbytes
        ones = [v for state in optimizer.state.values() for v in state.values() if v.numel() == 1]
        roles["states"] -= sum(v.nbytes for v in ones if v.dim())  # a whole tensor's scale, which `measure` leaves out
        assert {role: count / report.trained for role, count in roles.items()} == pytest.approx(
            {role: getattr(size, role) for role in roles}
        )
    kept = recipe.codes.master if recipe.codes else recipe.master
    narrow = recipe.weights != "fp32" or recipe.codes is not None
    lossy = narrow and kept is None and recipe.update_rounding != "stochastic"
    squares = recipe.moment("exp_avg_sq")
    still = squares.dtype == torch.bfloat16 and not squares.residual  # beta2 = 0.999
    expected = {"no master": lossy, "average stands still": still}
    assert {one.what for one in report.warnings} == {what for what, holds in expected.items() if holds}
    assert any(row.kind.startswith("master") for row in report.rows) == (kept is not None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lr", [1e-2, 3e-4, 1e-6])
def test_share_of_lost_updates_equals_exact_rounding(dtype, lr):
    model = Net().to(dtype)
    report = halfstep.audit(model, adamw(model, lr=lr))
    warning = found(report)["no master"]
    assert set(warning.tensors) == set(dict(model.named_parameters()))
    exact = {}
    for role, weight in (("embedding", model.wte.weight), ("norm", model.norm.weight), ("head", model.lm_head.weight)):
        w = weight.detach().double()
        kept = ((w + lr).to(dtype) == w) & ((w - lr).to(dtype) == w)
        exact[role] = kept[w != 0].double().mean().item()
    for role, share in exact.items():
        said = warning.text.partition(f"{role} ")[2].partition("%")[0].lstrip("<>")
        assert float(said) == pytest.approx(100 * share, rel=0.006, abs=0.011), (role, warning.text)
    assert f"lr = {lr:g} " in warning.text


def test_norm_weights_that_lose_all_updates_are_named():
    """RMSNorm weights at 1.0 in bf16 with lr below 2^-9: Adam's largest step rounds away."""
    model = Net().bfloat16()
    assert "norm 100%" in found(halfstep.audit(model, adamw(model, lr=1.9e-3)))["no master"].text
    assert "norm 0%" in found(halfstep.audit(model, adamw(model, lr=2.0e-3)))["no master"].text


def test_no_lost_share_is_stated_without_adam():
    model = Net().bfloat16()
    text = found(halfstep.audit(model, torch.optim.SGD(model.parameters(), lr=1e-3)))["no master"].text
    assert "lr" not in text


def test_stochastic_rounding_gives_no_master_warning():
    """torchao's optimizers round stochastically, for bf16 only."""
    model = Net().bfloat16()
    optimizer = adamw(model)
    optimizer.bf16_stochastic_round = True
    assert halfstep.audit(model, optimizer).warnings == ()
    model.half()
    assert set(found(halfstep.audit(model, optimizer))) == {"no master"}


def test_resume_with_narrowed_weights_is_found(tmp_path):
    model = Net()
    model, optimizer = stepped(model, adamw(model))
    halfstep.audit(model, optimizer).save(tmp_path / "before.json")
    resumed = Net(seed=1)
    resumed.load_state_dict({key: value.bfloat16() for key, value in model.state_dict().items()})
    again = adamw(resumed)
    again.load_state_dict(optimizer.state_dict())
    report = halfstep.audit(resumed, again)
    assert set(found(report)) == {"float32 lost"}
    assert found(report)["float32 lost"].tensors == tuple(dict(model.named_parameters()))
    assert "exactly bf16" in found(report)["float32 lost"].text
    before = type(report).load(tmp_path / "before.json")
    (change,) = report.differences(before)
    assert change.startswith("parameters: float32 (full) before, float32 (bf16) now: wte.weight")
    assert report.differences(report) == before.differences(before) == ()


def test_resume_with_narrowed_master_weights_is_found():
    model, optimizer, _ = prepared("bf16-master", Net(), None)
    stepped(model, optimizer)
    before = halfstep.audit(model, optimizer)
    assert before.warnings == ()
    assert kinds(before)["master"] == FULL
    for parameter in model.parameters():
        optimizer.state[parameter]["master"].copy_(parameter)
    report = halfstep.audit(model, optimizer)
    assert set(found(report)) == {"float32 lost"}
    assert "master copies in float32, every value exactly bf16" in found(report)["float32 lost"].text
    assert [line.split(":")[0] for line in report.differences(before)] == ["master"]
    for parameter in model.parameters():
        del optimizer.state[parameter]["master"]
    report = halfstep.audit(model, optimizer)
    assert "no master" in found(report)
    (change,) = report.differences(before)
    assert change == "master: float32 (full) before, missing now: wte.weight, mlp.weight, mlp.bias and 3 more"


def test_start_from_bf16_weights_is_a_note():
    model = Net()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    report = halfstep.audit(model, adamw(model))
    assert report.warnings == ()
    assert found(report)["started narrow"].level == "note"
    model.requires_grad_(False)
    assert halfstep.audit(model).findings == ()


def test_parameters_that_differ_from_rounded_masters_are_found():
    model, optimizer, _ = prepared("bf16-master", Net(), None)
    stepped(model, optimizer)
    with torch.no_grad():
        model.mlp.weight[3, 4] += 1
    assert found(halfstep.audit(model, optimizer))["stray master"].tensors == ("mlp.weight",)


def manual_masters(model):
    """Float32 copies that the optimizer steps on, as training loops made them before torch.amp."""
    masters = [p.detach().float() + 2.0**-12 * p.detach().float() for p in model.parameters()]
    return masters, torch.optim.AdamW(masters, lr=1e-3)


def test_manual_master_copies_are_recognised():
    model = Net().bfloat16()
    masters, optimizer = manual_masters(model)
    report = halfstep.audit(model, optimizer)
    assert set(found(report)) == {"master by hand"}
    assert found(report)["master by hand"].tensors == tuple(dict(model.named_parameters()))
    assert sum(row.nbytes for row in report.rows if row.kind == "master") == sum(m.nbytes for m in masters)
    with torch.no_grad():
        masters[0][5] += 1
    assert found(halfstep.audit(model, optimizer))["stale optimizer"].tensors == ("optimizer parameter 0",)


def test_stale_optimizer_is_found():
    model = Net()
    moved, optimizer = copy.deepcopy(model), adamw(model)
    report = halfstep.audit(moved, optimizer)
    assert set(found(report)) == {"stale optimizer", "not in the optimizer"}
    assert len(found(report)["stale optimizer"].tensors) == len(list(model.parameters()))
    assert {row.kind for row in report.rows} == {"parameters", "not the model's"}
    assert report.nbytes == 2 * sum(p.nbytes for p in model.parameters())


def test_parameters_without_optimizer_or_gradient_are_found():
    model = Net()
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if "norm" not in name])
    assert found(halfstep.audit(model, optimizer))["not in the optimizer"].tensors == ("norm.weight", "norm.bias")
    assert "no gradient" not in found(halfstep.audit(model, optimizer))
    model.mlp(torch.ones(32)).sum().backward()
    missing = found(halfstep.audit(model, optimizer))["no gradient"].tensors
    assert missing == ("wte.weight", "norm.weight", "norm.bias", "lm_head.weight")
    model.requires_grad_(False)
    model.mlp.requires_grad_()
    assert halfstep.audit(model, optimizer).findings == ()


def test_nonfinite_values_are_found():
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    optimizer.state[model[0].weight]["exp_avg_sq"][0, :3] = torch.inf
    model[3].bias.data[1] = torch.nan
    warning = found(halfstep.audit(model, optimizer))["not finite"]
    assert warning.tensors == ("3.bias", "exp_avg_sq of 0.weight")
    assert "4 in all" in warning.text


def test_tied_weights_count_once():
    model = Net()
    model.lm_head.weight = model.wte.weight
    model, optimizer = stepped(model, adamw(model))
    report = halfstep.audit(model, optimizer)
    assert found(report)["shared"].tensors == ("lm_head.weight",)
    assert "lm_head.weight is wte.weight" in found(report)["shared"].text
    assert report.nbytes == report.held == storages(model, optimizer)


def test_storages_larger_than_their_views_are_counted():
    model = Net()
    model.wte.weight.data = torch.randn(1000, 32)[:64]
    report = halfstep.audit(model)
    assert report.held - report.nbytes == 936 * 32 * 4
    assert "their storages hold" in str(report)


class EightBit(torch.optim.SGD):
    """States as bitsandbytes keeps them: codes, an absmax per block, and one shared table of levels."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=1e-3)
        levels = torch.linspace(-1, 1, 256)
        for parameter in model.parameters():
            if parameter.numel() < 64:
                self.state[parameter] = {"state1": torch.randn_like(parameter)}
                continue
            codes = torch.randint(0, 256, parameter.shape, dtype=torch.uint8)
            self.state[parameter] = {"state1": codes, "absmax1": torch.rand(-(-codes.numel() // 256)), "qmap1": levels}


def test_bitsandbytes_style_states_are_mixed():
    model = Net()
    optimizer = EightBit(model)
    report = halfstep.audit(model, optimizer)
    rows = {(row.kind, row.dtype): row for row in report.rows}
    assert rows["state1", "uint8"].nbytes == sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert rows["state1", "uint8"].effective is None
    assert rows["qmap1", "float32"].nbytes == 1024
    note = found(report)["mixed states"]
    assert (note.level, "3 in uint8, 3 in float32" in note.text) == ("note", True)
    assert report.nbytes == report.held == storages(model, optimizer)


def test_audit_changes_no_tensor():
    model, optimizer, _ = prepared("bf16-master", Net(), None)
    stepped(model, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    versions = [p._version for p in model.parameters()]
    halfstep.audit(model, optimizer)
    assert_same((model.state_dict(), optimizer.state_dict()), before)
    assert [p._version for p in model.parameters()] == versions


def test_text_has_a_line_per_row_and_finding():
    model, optimizer, _ = prepared("bf16-nomaster", Net(), None)
    stepped(model, optimizer)
    report = halfstep.audit(model, optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0))
    assert report.plan.startswith("Net under bf16-nomaster: no matmul rounds its operands; 12 bytes a parameter")
    lines = str(report).replace(report.plan + "\n", "").splitlines()
    assert lines[0] == "Net, LowBit: 5,216 trained parameters, 3 steps, loss scale 1024"
    assert lines[2].split()[:3] == ["parameters", "bfloat16", "full"]
    said = lines[1 + 1 + len(report.rows) + 1 :]
    assert len(report.findings) == 1
    assert said[0].startswith("warning: trained parameters in bfloat16 without a master copy")
    assert " ".join(map(str.strip, said)).endswith("(6): wte.weight, mlp.weight, mlp.bias and 3 more")
    assert all(line.startswith("  ") for line in said[1:])


def test_roles_follow_classes_and_steps_follow_groups():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["step"] = 7  # as apex's and TransformerEngine's fused Adam
    report = halfstep.audit(model, optimizer)
    assert {item.name: item.role for item in report.items} == {
        **dict.fromkeys(("0.weight", "0.bias", "3.weight", "3.bias"), "other"),
        **dict.fromkeys(("2.weight", "2.bias"), "norm"),
    }
    assert report.steps == (7, 7)


def test_precision_known_only_after_training_is_no_difference():
    model = Net()
    before = halfstep.audit(model)
    with torch.no_grad():
        model.norm.weight.normal_()
    assert halfstep.audit(model).differences(before) == ()


@pytest.mark.parametrize("bits", range(2, 9))
def test_quantized_integers_of_any_width_are_recognised(bits):
    model, most = nn.Linear(64, 64, bias=False), 2 ** (bits - 1) - 1
    with torch.no_grad():
        model.weight.copy_(torch.randint(-most, most + 1, (64, 64)) * 0.0123)
    (row,) = halfstep.audit(model).rows
    assert bits == 2 or row.effective == f"scaled int{bits}"
