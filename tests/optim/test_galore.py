"""GaLore (Adam in a subspace of each gradient) against algorithm 2 in float64, SGD, and galore-torch."""

import sys
import types
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import ModelError, OptimizerError, RecipeError
from halfstep.memory import measure
from halfstep.optim.rules import no_fused_update
from halfstep.optim.states import singular_vectors
from halfstep.recipe import PROJECTOR, Projection, Subspace, from_data, get_recipe, to_data
from tiny import PROJECTED, assert_same, batch, mlp, prepared


SHAPES = {"wide": (6, 10), "tall": (10, 6), "square": (7, 7)}


def recipe_of(base="fp32", **options):
    return replace(get_recipe(base), name="made", projection=Projection(**{"share": None, **options}))


def single_matrix(shape, recipe, build=torch.optim.AdamW, **options):
    """A model of one matrix, and its optimizer."""
    model = nn.Linear(shape[1], shape[0], bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 4)
    options = {"lr": 0.05, **options}
    model, optimizer, scaler = halfstep.prepare(model, build(model.parameters(), **options), recipe, generator=3)
    return model.weight, optimizer, scaler


def grad_of(shape, step):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + step))


def run(weight, optimizer, steps, start=0):
    for step in range(start, start + steps):
        weight.grad = grad_of(tuple(weight.shape), step).to(weight.dtype)
        optimizer.step()
    return weight


def algorithm_2(weight, steps, rank, gap, scale, lr, decay=0.0, l2=0.0, betas=(0.9, 0.999), eps=1e-8, left=None):
    """The paper's algorithm 2 in float64, with G the gradient (not its negative)."""
    w = weight.double().numpy().copy()
    left = w.shape[0] <= w.shape[1] if left is None else left
    m = v = 0.0
    for t in range(steps):
        g = grad_of(w.shape, t).double().numpy()
        if t % gap == 0:
            u, _, vh = np.linalg.svd(g, full_matrices=False)
            p = u[:, :rank] if left else vh[:rank].T
            p = p * np.where(p[np.abs(p).argmax(0), np.arange(rank)] < 0, -1, 1)
        g = g + l2 * w
        r = p.T @ g if left else g @ p
        m, v = betas[0] * m + (1 - betas[0]) * r, betas[1] * v + (1 - betas[1]) * r * r
        u = (m / (1 - betas[0] ** (t + 1))) / (np.sqrt(v / (1 - betas[1] ** (t + 1))) + eps)
        w = w * (1 - lr * decay) - lr * scale * (p @ u if left else u @ p.T)
    return torch.from_numpy(w)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("side", ["short", "long", "left", "right"])
def test_adamw_equals_algorithm_2(shape, side):
    """Over several subspaces, with decoupled decay of the whole weight."""
    weight, optimizer, _ = single_matrix(shape, recipe_of(rank=3, gap=4, side=side), weight_decay=0.1)
    expected = {
        "short": shape[0] <= shape[1], "long": shape[0] > shape[1], "left": True, "right": False,
    }[side]  # fmt: skip
    wanted = algorithm_2(weight.detach(), 11, 3, 4, 0.25, 0.05, decay=0.1, left=expected)
    torch.testing.assert_close(run(weight, optimizer, 11).detach().double(), wanted, rtol=0, atol=2e-5)
    own = Subspace(3, expected)
    state = optimizer.state[weight]
    assert tuple(state[PROJECTOR].shape) == own.projector(shape)
    assert tuple(state["exp_avg"].shape) == own.moment(shape)


def test_adam_adds_its_decay_to_the_gradient_before_the_projection():
    weight, optimizer, _ = single_matrix((6, 10), recipe_of(rank=3, gap=4), torch.optim.Adam, weight_decay=0.1)
    wanted = algorithm_2(weight.detach(), 6, 3, 4, 0.25, 0.05, l2=0.1)
    torch.testing.assert_close(run(weight, optimizer, 6).detach().double(), wanted, rtol=0, atol=2e-5)


def test_maximize_goes_the_other_way():
    up, optimizer, _ = single_matrix((6, 10), recipe_of(rank=3), maximize=True, weight_decay=0.0)
    start = up.detach().clone()
    down, other, _ = single_matrix((6, 10), recipe_of(rank=3), weight_decay=0.0)
    torch.testing.assert_close(run(up, optimizer, 3) - start, start - run(down, other, 3), rtol=0, atol=1e-6)


# ---- properties that the paper states -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_full_rank_galore_equals_sgd_but_not_adam(shape):
    full = recipe_of(rank=min(shape), scale=1.0, gap=5)
    for build, same in ((torch.optim.SGD, True), (torch.optim.AdamW, False)):
        weight, optimizer, _ = single_matrix(shape, full, build)
        plain, stock, _ = single_matrix(shape, "fp32", build)
        gap = float((run(weight, optimizer, 30) - run(plain, stock, 30)).detach().abs().max())
        assert gap < 1e-5 if same else gap > 0.1, (build, gap)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_projection_error_is_that_of_the_smaller_singular_values(shape):
    grad = grad_of(shape, 0).double()
    for rank in range(1, min(shape) + 1):
        left = shape[0] <= shape[1]
        p = singular_vectors(grad, Subspace(rank, left))
        values = torch.linalg.svdvals(grad)
        back = p @ (p.T @ grad) if left else (grad @ p) @ p.T
        lost = (back - grad).norm() / grad.norm()
        assert float((lost - values[rank:].norm() / values.norm()).abs()) < 1e-12
        assert float((p.T @ p - torch.eye(rank)).abs().max()) < 1e-12
        assert bool((p.gather(0, p.abs().argmax(0, keepdim=True)) > 0).all())  # a convention that fixes the signs
        assert_same(singular_vectors(-grad, Subspace(rank, left)), p)


@pytest.mark.parametrize(("shape", "state"), [((5, 9), (1, 9)), ((9, 5), (9, 1)), ((6, 6), (1, 6))])
def test_the_first_step_on_a_rank_one_gradient_has_its_signs(shape, state):
    """Each row along P has one magnitude, where full Adam has one magnitude everywhere."""
    weight, optimizer, _ = single_matrix(shape, recipe_of(rank=1), weight_decay=0.0)
    before, generator = weight.detach().clone(), torch.Generator().manual_seed(3)
    weight.grad = torch.outer(*(torch.randn(size, generator=generator) for size in shape))
    grad = weight.grad.clone()
    optimizer.step()
    moved = before - weight.detach()
    assert_same(torch.sign(moved), torch.sign(grad))
    assert tuple(optimizer.state[weight]["exp_avg"].shape) == state
    left = shape[0] <= shape[1]
    rows = moved.abs() if left else moved.abs().T
    torch.testing.assert_close(rows, rows[:, :1].expand_as(rows), rtol=1e-3, atol=1e-6)
    assert float(rows[:, 0].std()) > 1e-3 * float(rows.mean())


@pytest.mark.parametrize("rank", [1, 3, 5])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_weights_and_states_take_mn_plus_mr_plus_2nr_elements(shape, rank):
    weight, optimizer, _ = single_matrix(shape, recipe_of(rank=rank))
    size = measure(types.SimpleNamespace(parameters=lambda: [weight]), optimizer)
    m, n = sorted(shape)
    assert (size.weights + size.states) * m * n == 4 * (m * n + m * rank + 2 * n * rank)
    assert optimizer.recipe.bytes_per_parameter(shape=shape).states * m * n == pytest.approx(4 * (m + 2 * n) * rank)


@pytest.mark.parametrize(("steps", "calls"), [(1, 1), (20, 1), (21, 2), (60, 3), (61, 4)])
def test_an_svd_runs_every_gap_steps(steps, calls, monkeypatch):
    weight, optimizer, _ = single_matrix((3, 4), recipe_of(rank=1, gap=20))
    made, stock = [], torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda *a, **k: made.append(1) or stock(*a, **k))
    run(weight, optimizer, steps)
    assert len(made) == calls


@pytest.mark.slow
@pytest.mark.parametrize(("build", "lr"), [(torch.optim.SGD, 0.1), (torch.optim.Adam, 0.05)])
def test_a_fixed_subspace_stalls_and_changing_ones_converge(build, lr):
    """A regression of 8 outputs on 16 inputs; moments are not transformed when the subspace changes."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    y = x @ torch.randn(16, 8, generator=torch.Generator().manual_seed(1)) / 2
    found = {}
    for gap in (10**6, 50, 10):
        weight, optimizer, _ = single_matrix((8, 16), recipe_of(rank=2, gap=gap, scale=1.0), build, lr=lr)
        with torch.no_grad():
            weight.zero_()
        losses = []
        for _ in range(600):
            loss = (x @ weight.T - y).square().mean()
            weight.grad = torch.autograd.grad(loss * 4, weight)[0]
            optimizer.step()
            losses.append(float(loss.detach()))
        found[gap] = losses[-1] / losses[0]
    assert found[10**6] > 0.2
    assert max(found[50], found[10]) < 1e-4


# ---- kernels, masters, loss scales ----------------------------------------------------------------------------------


@pytest.mark.quick("AdamW-galore", "AdamW-bf16-kahan", "AdamW-bf16-nomaster")
@pytest.mark.parametrize("base", ["galore", "galore-8bit", "bf16-master", "bf16-kahan", "bf16-nomaster", "galore-bf16"])
@pytest.mark.parametrize("build", [torch.optim.AdamW, torch.optim.Adam])
def test_the_kernel_in_the_subspace_equals_the_reference(base, build):
    """Projected moments have more than 4096 elements, so 8 bits apply."""
    found = []
    for fused in (True, False):
        recipe = recipe_of(base, rank=33, gap=2, share=None)
        weight, optimizer, _ = single_matrix((70, 130), recipe, build, weight_decay=0.1)
        if not fused:
            optimizer.rule = replace(optimizer.rule, fused=no_fused_update)
        run(weight, optimizer, 4)
        found.append((weight.detach(), dict(optimizer.state[weight])))
    assert_same(*found)
    coded = base == "galore-8bit"
    assert (found[0][1]["exp_avg"].dtype == torch.uint8) == coded == ("exp_avg_scale" in found[0][1])


def test_masters_accumulate_updates_below_bf16s_resolution():
    weight, optimizer, _ = single_matrix((8, 12), recipe_of("bf16-master", rank=4), lr=1e-5)
    plain, stock, _ = single_matrix((8, 12), recipe_of("bf16-nomaster", rank=4), lr=1e-5)
    before = optimizer.full(weight)
    run(weight, optimizer, 3)
    assert float((optimizer.full(weight) - before).abs().max()) > 1e-6
    assert float((run(plain, stock, 3).detach().float() - before).abs().max()) < 2.0**-8


def test_loss_scales_change_no_bit_and_overflows_change_nothing():
    """For powers of two, the projector included."""
    found = []
    for scale in (1.0, 1024.0):
        weight, optimizer, _ = single_matrix((6, 10), recipe_of(rank=3, gap=2))
        scaler = halfstep.LossScaler(init_scale=scale)
        for step in range(5):
            if step == 2:  # a step that would choose a subspace
                weight.grad = torch.full((6, 10), float("inf"))
                scaler.step(optimizer)
                scaler.update(new_scale=scale)
            weight.grad = grad_of((6, 10), step) * scale
            scaler.clip_grad_norm_(optimizer, 3.0)
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.state[weight]["step"] == 5
        found.append((weight.detach(), dict(optimizer.state[weight])))
    assert_same(*found)


def test_watched_reports_low_rank_updates():
    weight, optimizer, _ = single_matrix((6, 10), recipe_of(rank=3), weight_decay=0.0)
    seen, before = [], weight.detach().clone()
    with optimizer.watched(seen.append):
        run(weight, optimizer, 1)
    assert_same(seen[0].wanted, weight.detach() - before)
    assert int(torch.linalg.matrix_rank(seen[0].wanted, atol=1e-5)) == 3


def test_projectors_in_bf16_are_orthonormal_to_8_bits():
    recipe = replace(recipe_of(rank=8), moments=((PROJECTOR, "bf16"), ("*", "fp32")))
    weight, optimizer, _ = single_matrix((40, 60), recipe)
    run(weight, optimizer, 1)
    p = optimizer.state[weight][PROJECTOR]
    lost = float((p.float().T @ p.float() - torch.eye(8)).abs().max())
    assert p.dtype == torch.bfloat16
    assert 0 < lost < 2.0**-8


# ---- zero, low-rank and nonfinite gradients -------------------------------------------------------------------------


def test_zero_gradients_choose_no_subspace():
    """As those of a layer before one that is initialized to zero."""
    weight, optimizer, _ = single_matrix((6, 10), recipe_of(rank=3, gap=200), weight_decay=0.0)
    before = weight.detach().clone()
    weight.grad = torch.zeros(6, 10)
    optimizer.step()
    assert_same(weight.detach(), before)
    assert not optimizer.state[weight][PROJECTOR].any()
    run(weight, optimizer, 1)
    assert_same(optimizer.state[weight][PROJECTOR], singular_vectors(grad_of((6, 10), 0), Subspace(3, True)))
    for _ in range(201):  # later zeros keep the present one
        weight.grad = torch.zeros(6, 10)
        optimizer.step()
    assert_same(optimizer.state[weight][PROJECTOR], singular_vectors(grad_of((6, 10), 0), Subspace(3, True)))


def test_a_rank_deficient_gradient_gives_an_orthonormal_projector():
    weight, optimizer, _ = single_matrix((6, 10), recipe_of(rank=4))
    weight.grad = torch.outer(torch.arange(6.0), torch.ones(10))
    optimizer.step()
    p = optimizer.state[weight][PROJECTOR]
    torch.testing.assert_close(p.T @ p, torch.eye(4), rtol=0, atol=1e-5)
    assert bool(weight.isfinite().all())


def test_a_nonfinite_gradient_is_refused_without_changes():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer, _ = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), recipe_of(rank=2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model[1].weight.grad[0, 0] = float("nan")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(OptimizerError, match=r"parameter 2 \(1.weight\) has a gradient that is not finite, at step 1"):
        optimizer.step()
    assert_same([p.detach() for p in model.parameters()], before)


def test_a_failing_svd_is_an_error_first_and_later_keeps_the_projector(monkeypatch):
    weight, optimizer, _ = single_matrix((6, 10), recipe_of(rank=3, gap=2))

    def fails(*args, **options):
        raise torch.linalg.LinAlgError("svd did not converge")

    with monkeypatch.context() as patched:
        patched.setattr(torch.linalg, "svd", fails)
        before = weight.detach().clone()
        with pytest.raises(
            OptimizerError, match=r"parameter 0 \(weight\): the singular vectors .* not found .*svd did"
        ):
            run(weight, optimizer, 1)
        assert_same(weight.detach(), before)
    run(weight, optimizer, 2)
    old = optimizer.state[weight][PROJECTOR].clone()
    with monkeypatch.context() as patched:
        patched.setattr(torch.linalg, "svd", fails)
        with pytest.warns(UserWarning, match="those of an earlier step stay"):
            run(weight, optimizer, 1, 2)
    assert_same(optimizer.state[weight][PROJECTOR], old)
    run(weight, optimizer, 2, 3)
    assert not torch.equal(optimizer.state[weight][PROJECTOR], old)


# ---- projected parameters -------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.norm = nn.LayerNorm(8)
        self.tied = nn.Linear(8, 11, bias=False)
        self.tied.weight = self.embed.weight
        self.lm_head = nn.Linear(8, 11)

    def forward(self, x):
        x = self.embed(x)
        return self.lm_head(self.norm(self.mlp(self.attn(x, x, x)[0])))


def projected_in(model, recipe):
    model, optimizer, _ = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    return {name for name, p in model.named_parameters() if PROJECTOR in optimizer.state[p]}


def test_linear_layers_are_projected_but_not_heads_norms_and_embeddings():
    matrices = {"attn.in_proj_weight", "attn.out_proj.weight", "mlp.0.weight", "mlp.2.weight"}
    assert projected_in(Block(), "galore") == matrices
    assert projected_in(Block(), recipe_of(rank=2, paths=("*mlp*",))) == {"mlp.0.weight", "mlp.2.weight"}
    assert projected_in(Block(), recipe_of(rank=2, paths=("lm_head",))) == {"lm_head.weight"}


def test_the_audit_names_projected_and_unprojected_parameters():
    model, optimizer, _ = halfstep.prepare(model := Block(), torch.optim.AdamW(model.parameters()), "galore")
    (note,) = [found for found in halfstep.audit(model, optimizer).findings if found.what == "projected"]
    assert note.tensors == ("attn.in_proj_weight", "attn.out_proj.weight", "mlp.0.weight", "mlp.2.weight")
    assert note.text.endswith("(GaLore), others (embed.weight, lm_head.weight) as a whole")


def test_parameters_added_later_are_projected():
    model = mlp()
    model[3].requires_grad_(False)
    model, optimizer, _ = halfstep.prepare(model, torch.optim.AdamW(model[0].parameters()), "galore")
    optimizer.add_param_group({"params": list(model[3].requires_grad_(True).parameters())})
    model(batch()[0]).square().mean().backward()
    optimizer.step()
    assert PROJECTOR in optimizer.state[model[3].weight]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paths": ("*mlq*",)}, r"projection path '\*mlq\*' matched no linear layer. Nearest: .*mlp"),
        ({"rank": 9}, r"attn.in_proj_weight: rank = 9 of a matrix of shape \(24, 8\), which has 8; lower the rank"),
    ],
)
def test_invalid_projections_are_refused_without_changes(options, message):
    model = Block()
    kinds, optimizer = [type(m) for m in model.modules()], torch.optim.AdamW(model.parameters())
    with pytest.raises(RecipeError, match=message):
        halfstep.prepare(model, optimizer, recipe_of(**{"rank": 2, **options}))
    assert [type(m) for m in model.modules()] == kinds


def test_groups_with_galore_torchs_options_are_refused():
    model = nn.Linear(8, 8)
    groups = [{"params": [model.weight], "rank": 2, "update_proj_gap": 10}, {"params": [model.bias]}]
    with pytest.raises(OptimizerError, match=r"group 0 of this AdamW has rank, update_proj_gap, which only GaLore's"):
        halfstep.prepare(model, torch.optim.AdamW(groups), "galore")


def test_a_model_without_linear_layers_is_refused():
    model = nn.Sequential(nn.Conv1d(2, 2, 3), nn.Linear(1, 5))
    with pytest.raises(RecipeError, match="'galore' projects the gradients of linear layers, and Sequential has none"):
        prepared("galore", model)


@pytest.mark.parametrize("build", [halfstep.optim.Lion, halfstep.optim.Lamb])
def test_lion_and_lamb_with_galore_are_refused(build):
    model = mlp()
    with pytest.raises(OptimizerError, match="Expected Adagrad, Adam, AdamW, NAdam, RMSprop or SGD"):
        halfstep.prepare(model, build(model.parameters()), "galore")


def test_an_optimizer_with_unprojected_moments_is_refused():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch()[0]).sum().backward()
    optimizer.step()
    with pytest.raises(OptimizerError, match=r"AdamW has moments of 0.weight.*Hand halfstep.prepare a new AdamW"):
        halfstep.prepare(model, optimizer, "galore")
    assert len(optimizer.state) == 6
    halfstep.prepare(model, optimizer, "bf16-mixed")


def test_sharded_weights_are_refused():
    model = mlp()
    model[3].weight.device_mesh = "two ranks"
    with pytest.raises(ModelError, match=r"3.weight is sharded.*Train under DDP"):
        halfstep.nn.layers.projections(model, get_recipe("galore"))


def galore_torch(monkeypatch):
    """galore-torch, with stubs for the 8-bit modules that it imports and does not use here."""
    for name, attributes in {
        "bitsandbytes": {},
        "bitsandbytes.optim": {},
        "bitsandbytes.optim.optimizer": {"Optimizer2State": object},
    }.items():
        if name not in sys.modules:
            module = types.ModuleType(name)
            vars(module).update(attributes)
            monkeypatch.setitem(sys.modules, name, module)
    return pytest.importorskip("galore_torch")


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_galore_matches_galore_torch(shape, monkeypatch):
    """Up to eps, which galore-torch adds before the bias correction. Signs of singular vectors are fixed for both,
    since moments are not transformed when the subspace changes. Weight decay is 0, since galore-torch applies it
    last."""
    theirs = galore_torch(monkeypatch)
    weight, optimizer, _ = single_matrix(shape, recipe_of(rank=3, gap=4), weight_decay=0.0)
    other = nn.Parameter(weight.detach().clone())
    options = {"rank": 3, "update_proj_gap": 4, "scale": 0.25, "proj_type": "std"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock = theirs.GaLoreAdamW([{"params": [other], **options}], lr=0.05, eps=1e-8)
    run(weight, optimizer, 10)

    def signed(grad, full_matrices):
        u, s, vh = svd(grad, full_matrices=full_matrices)
        v = u if grad.shape[0] < grad.shape[1] else vh.T
        signs = torch.sign(v.gather(0, v.abs().argmax(0, keepdim=True)))
        return u * signs, s, vh * signs.T

    svd = torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", signed)
    run(other, stock, 10)
    torch.testing.assert_close(weight.detach(), other.detach(), rtol=0, atol=1e-5)


# ---- recipe data ----------------------------------------------------------------------------------------------------


def test_projections_round_trip_through_data():
    for recipe in (recipe_of(rank=5, side="long", paths=("*mlp*",)), get_recipe("galore-8bit"), get_recipe("fp32")):
        assert from_data(to_data(recipe), get_recipe) == recipe
    own = from_data({"name": "own", "base": "bf16-master", "projection": {"rank": 4, "share": "none"}}, get_recipe)
    assert own.projection == Projection(rank=4, share=None)
    assert from_data({"name": "own", "base": "galore", "projection": "none"}, get_recipe).projection is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "projection rank = 0"),
        ({"gap": 0}, "projection gap = 0"),
        ({"scale": 0.0}, "projection scale = 0.0"),
        ({"share": 1.5}, "projection share = 1.5"),
        ({"side": "top"}, "projection unknown side 'top'"),
    ],
)
def test_invalid_values_are_refused(options, message):
    with pytest.raises(RecipeError, match=message):
        Projection(**options)
    with pytest.raises(RecipeError, match=message):
        from_data({"name": "own", "projection": options}, get_recipe)


def test_projections_with_coded_weights_or_coded_projectors_are_refused():
    with pytest.raises(RecipeError, match="projection, with codes = weights that rules round"):
        replace(get_recipe("fp8lm-o2"), name="made", projection=Projection())
    with pytest.raises(
        RecipeError, match=r"moments: projector kept as dynamic8.*expected .* vectors in fp32, bf16 or fp16"
    ):
        replace(get_recipe("adamw-8bit"), name="made", projection=Projection())


def test_describe_names_the_projection():
    assert "rank 128, at most 0.5 of the short side" in get_recipe("galore").describe()
    for name in PROJECTED:
        states = get_recipe(name).bytes_per_parameter(shape=(1024, 4096)).states
        assert f"states of a 1024 x 4096 matrix take {states:.4g} bytes a parameter" in " ".join(
            get_recipe(name).describe().split()
        )
