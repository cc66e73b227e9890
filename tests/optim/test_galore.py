"""GaLore: Adam in a subspace of each gradient, against a plain float64 algorithm 2, SGD, and galore-torch."""

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


def one(shape, recipe, build=torch.optim.AdamW, **options):
    """A model that is one matrix, and its optimizer."""
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
    """The paper's, in float64, with G the gradient (not the negative one)."""
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
def test_adamw_is_algorithm_2(shape, side):
    """Across changes of the subspace, with decoupled decay of the whole weight."""
    weight, optimizer, _ = one(shape, recipe_of(rank=3, gap=4, side=side), weight_decay=0.1)
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
    weight, optimizer, _ = one((6, 10), recipe_of(rank=3, gap=4), torch.optim.Adam, weight_decay=0.1)
    wanted = algorithm_2(weight.detach(), 6, 3, 4, 0.25, 0.05, l2=0.1)
    torch.testing.assert_close(run(weight, optimizer, 6).detach().double(), wanted, rtol=0, atol=2e-5)


def test_maximize_goes_the_other_way():
    up, optimizer, _ = one((6, 10), recipe_of(rank=3), maximize=True, weight_decay=0.0)
    start = up.detach().clone()
    down, other, _ = one((6, 10), recipe_of(rank=3), weight_decay=0.0)
    torch.testing.assert_close(run(up, optimizer, 3) - start, start - run(down, other, 3), rtol=0, atol=1e-6)


# ---- the acceptance tests of the paper's sheet ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_of_full_rank_sgd_is_sgd_and_adam_is_not_adam(shape):
    full = recipe_of(rank=min(shape), scale=1.0, gap=5)
    for build, same in ((torch.optim.SGD, True), (torch.optim.AdamW, False)):
        weight, optimizer, _ = one(shape, full, build)
        plain, stock, _ = one(shape, "fp32", build)
        gap = float((run(weight, optimizer, 30) - run(plain, stock, 30)).detach().abs().max())
        assert gap < 1e-5 if same else gap > 0.1, (build, gap)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_a_projection_loses_is_the_small_singular_values(shape):
    grad = grad_of(shape, 0).double()
    for rank in range(1, min(shape) + 1):
        left = shape[0] <= shape[1]
        p = singular_vectors(grad, Subspace(rank, left))
        values = torch.linalg.svdvals(grad)
        back = p @ (p.T @ grad) if left else (grad @ p) @ p.T
        lost = (back - grad).norm() / grad.norm()
        assert float((lost - values[rank:].norm() / values.norm()).abs()) < 1e-12
        assert float((p.T @ p - torch.eye(rank)).abs().max()) < 1e-12
        assert bool((p.gather(0, p.abs().argmax(0, keepdim=True)) > 0).all())  # and so the signs are nobody's choice
        assert_same(singular_vectors(-grad, Subspace(rank, left)), p)


@pytest.mark.parametrize(("shape", "state"), [((5, 9), (1, 9)), ((9, 5), (9, 1)), ((6, 6), (1, 6))])
def test_the_first_step_on_a_gradient_of_rank_one(shape, state):
    """It has the gradient's signs, and along each row of P one magnitude, where full Adam has one everywhere."""
    weight, optimizer, _ = one(shape, recipe_of(rank=1), weight_decay=0.0)
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
def test_what_is_kept_is_mn_and_mr_and_2nr(shape, rank):
    weight, optimizer, _ = one(shape, recipe_of(rank=rank))
    size = measure(types.SimpleNamespace(parameters=lambda: [weight]), optimizer)
    m, n = sorted(shape)
    assert (size.weights + size.states) * m * n == 4 * (m * n + m * rank + 2 * n * rank)
    assert optimizer.recipe.bytes_per_parameter(shape=shape).states * m * n == pytest.approx(4 * (m + 2 * n) * rank)


@pytest.mark.parametrize(("steps", "calls"), [(1, 1), (20, 1), (21, 2), (60, 3), (61, 4)])
def test_a_decomposition_every_gap(steps, calls, monkeypatch):
    weight, optimizer, _ = one((3, 4), recipe_of(rank=1, gap=20))
    made, stock = [], torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda *a, **k: made.append(1) or stock(*a, **k))
    run(weight, optimizer, steps)
    assert len(made) == calls


@pytest.mark.slow
@pytest.mark.parametrize(("build", "lr"), [(torch.optim.SGD, 0.1), (torch.optim.Adam, 0.05)])
def test_a_fixed_subspace_stalls_and_a_new_one_now_and_then_converges(build, lr):
    """A regression of 16 inputs on 8 outputs; moments that are not turned do not prevent it."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    y = x @ torch.randn(16, 8, generator=torch.Generator().manual_seed(1)) / 2
    found = {}
    for gap in (10**6, 50, 10):
        weight, optimizer, _ = one((8, 16), recipe_of(rank=2, gap=gap, scale=1.0), build, lr=lr)
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


# ---- everything else of the optimizer -------------------------------------------------------------------------------


@pytest.mark.quick("AdamW-galore", "AdamW-bf16-kahan", "AdamW-bf16-nomaster")
@pytest.mark.parametrize("base", ["galore", "galore-8bit", "bf16-master", "bf16-kahan", "bf16-nomaster", "galore-bf16"])
@pytest.mark.parametrize("build", [torch.optim.AdamW, torch.optim.Adam])
def test_the_kernel_in_the_subspace_is_the_reference_bit_for_bit(base, build):
    """Low moments of more than 4096 numbers, which 8 bits keep as codes."""
    found = []
    for fused in (True, False):
        recipe = recipe_of(base, rank=33, gap=2, share=None)
        weight, optimizer, _ = one((70, 130), recipe, build, weight_decay=0.1)
        if not fused:
            optimizer.rule = replace(optimizer.rule, fused=no_fused_update)
        run(weight, optimizer, 4)
        found.append((weight.detach(), dict(optimizer.state[weight])))
    assert_same(*found)
    coded = base == "galore-8bit"
    assert (found[0][1]["exp_avg"].dtype == torch.uint8) == coded == ("exp_avg_scale" in found[0][1])


def test_masters_take_the_small_steps():
    weight, optimizer, _ = one((8, 12), recipe_of("bf16-master", rank=4), lr=1e-5)
    plain, stock, _ = one((8, 12), recipe_of("bf16-nomaster", rank=4), lr=1e-5)
    before = optimizer.full(weight)
    run(weight, optimizer, 3)
    assert float((optimizer.full(weight) - before).abs().max()) > 1e-6
    assert float((run(plain, stock, 3).detach().float() - before).abs().max()) < 2.0**-8


def test_a_loss_scale_is_divided_out_and_an_overflow_moves_nothing():
    """Powers of two: the same bits, in the projector too."""
    found = []
    for scale in (1.0, 1024.0):
        weight, optimizer, _ = one((6, 10), recipe_of(rank=3, gap=2))
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


def test_updates_are_watched():
    weight, optimizer, _ = one((6, 10), recipe_of(rank=3), weight_decay=0.0)
    seen, before = [], weight.detach().clone()
    with optimizer.watched(seen.append):
        run(weight, optimizer, 1)
    assert_same(seen[0].wanted, weight.detach() - before)
    assert int(torch.linalg.matrix_rank(seen[0].wanted, atol=1e-5)) == 3


def test_vectors_kept_in_bf16_are_orthonormal_to_8_bits():
    recipe = replace(recipe_of(rank=8), moments=((PROJECTOR, "bf16"), ("*", "fp32")))
    weight, optimizer, _ = one((40, 60), recipe)
    run(weight, optimizer, 1)
    p = optimizer.state[weight][PROJECTOR]
    lost = float((p.float().T @ p.float() - torch.eye(8)).abs().max())
    assert p.dtype == torch.bfloat16
    assert 0 < lost < 2.0**-8


# ---- gradients that span nothing, or nothing that can be found ------------------------------------------------------


def test_zeros_choose_no_subspace():
    """A layer behind one that starts at zero has no gradient at first; its subspace is the first gradient's."""
    weight, optimizer, _ = one((6, 10), recipe_of(rank=3, gap=200), weight_decay=0.0)
    before = weight.detach().clone()
    weight.grad = torch.zeros(6, 10)
    optimizer.step()
    assert_same(weight.detach(), before)
    assert not optimizer.state[weight][PROJECTOR].any()
    run(weight, optimizer, 1)
    assert_same(optimizer.state[weight][PROJECTOR], singular_vectors(grad_of((6, 10), 0), Subspace(3, True)))
    for _ in range(201):  # and zeros later keep the one that is there
        weight.grad = torch.zeros(6, 10)
        optimizer.step()
    assert_same(optimizer.state[weight][PROJECTOR], singular_vectors(grad_of((6, 10), 0), Subspace(3, True)))


def test_a_gradient_of_lower_rank_still_gives_orthonormal_vectors():
    weight, optimizer, _ = one((6, 10), recipe_of(rank=4))
    weight.grad = torch.outer(torch.arange(6.0), torch.ones(10))
    optimizer.step()
    p = optimizer.state[weight][PROJECTOR]
    torch.testing.assert_close(p.T @ p, torch.eye(4), rtol=0, atol=1e-5)
    assert bool(weight.isfinite().all())


def test_a_gradient_that_is_not_finite_chooses_nothing_and_moves_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer, _ = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), recipe_of(rank=2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model[1].weight.grad[0, 0] = float("nan")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(OptimizerError, match=r"parameter 2 \(1.weight\) has a gradient that is not finite, at step 1"):
        optimizer.step()
    assert_same([p.detach() for p in model.parameters()], before)


def test_vectors_that_are_not_found_leave_the_old_ones(monkeypatch):
    weight, optimizer, _ = one((6, 10), recipe_of(rank=3, gap=2))

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


# ---- which parameters -----------------------------------------------------------------------------------------------


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


def test_linear_layers_are_projected_and_heads_norms_and_embeddings_are_not():
    matrices = {"attn.in_proj_weight", "attn.out_proj.weight", "mlp.0.weight", "mlp.2.weight"}
    assert projected_in(Block(), "galore") == matrices
    assert projected_in(Block(), recipe_of(rank=2, paths=("*mlp*",))) == {"mlp.0.weight", "mlp.2.weight"}
    assert projected_in(Block(), recipe_of(rank=2, paths=("lm_head",))) == {"lm_head.weight"}


def test_an_audit_says_what_is_projected_and_what_is_not():
    model, optimizer, _ = halfstep.prepare(model := Block(), torch.optim.AdamW(model.parameters()), "galore")
    (note,) = [found for found in halfstep.audit(model, optimizer).findings if found.what == "projected"]
    assert note.tensors == ("attn.in_proj_weight", "attn.out_proj.weight", "mlp.0.weight", "mlp.2.weight")
    assert note.text.endswith("(GaLore), others (embed.weight, lm_head.weight) as a whole")


def test_parameters_that_come_later_are_projected_as_the_others():
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
def test_what_cannot_be_projected_is_named_and_nothing_changes(options, message):
    model = Block()
    kinds, optimizer = [type(m) for m in model.modules()], torch.optim.AdamW(model.parameters())
    with pytest.raises(RecipeError, match=message):
        halfstep.prepare(model, optimizer, recipe_of(**{"rank": 2, **options}))
    assert [type(m) for m in model.modules()] == kinds


def test_groups_of_galore_torch_are_not_ignored():
    model = nn.Linear(8, 8)
    groups = [{"params": [model.weight], "rank": 2, "update_proj_gap": 10}, {"params": [model.bias]}]
    with pytest.raises(OptimizerError, match=r"group 0 of this AdamW has rank, update_proj_gap, which only GaLore's"):
        halfstep.prepare(model, torch.optim.AdamW(groups), "galore")


def test_a_model_without_linear_layers_is_refused():
    model = nn.Sequential(nn.Conv1d(2, 2, 3), nn.Linear(1, 5))
    with pytest.raises(RecipeError, match="'galore' projects the gradients of linear layers, and Sequential has none"):
        prepared("galore", model)


@pytest.mark.parametrize("build", [halfstep.optim.Lion, halfstep.optim.Lamb])
def test_rules_whose_steps_hang_on_more_than_gradients_are_refused(build):
    model = mlp()
    with pytest.raises(OptimizerError, match="Expected Adagrad, Adam, AdamW, NAdam, RMSprop or SGD"):
        halfstep.prepare(model, build(model.parameters()), "galore")


def test_moments_that_are_there_have_no_place_in_a_subspace():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch()[0]).sum().backward()
    optimizer.step()
    with pytest.raises(OptimizerError, match=r"AdamW has moments of 0.weight.*Hand halfstep.prepare a new AdamW"):
        halfstep.prepare(model, optimizer, "galore")
    assert len(optimizer.state) == 6
    halfstep.prepare(model, optimizer, "bf16-mixed")


def test_shards_are_refused_by_name():
    model = mlp()
    model[3].weight.device_mesh = "two ranks"
    with pytest.raises(ModelError, match=r"3.weight is sharded.*Train under DDP"):
        halfstep.nn.layers.projections(model, get_recipe("galore"))


def galore_torch(monkeypatch):
    """galore-torch's AdamW, which imports transformers only for a version check, and 8-bit parts that are not used."""
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
def test_it_trains_as_galore_torch_does(shape, monkeypatch):
    """Up to eps, which it adds before it corrects the bias, and to the signs of vectors, which are given to it: moments
    are not turned when the subspace changes, so that signs matter there. Without decay, which it applies last."""
    theirs = galore_torch(monkeypatch)
    weight, optimizer, _ = one(shape, recipe_of(rank=3, gap=4), weight_decay=0.0)
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


# ---- the record -----------------------------------------------------------------------------------------------------


def test_it_goes_through_data_and_back():
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
def test_values_that_mean_nothing(options, message):
    with pytest.raises(RecipeError, match=message):
        Projection(**options)
    with pytest.raises(RecipeError, match=message):
        from_data({"name": "own", "projection": options}, get_recipe)


def test_what_a_recipe_cannot_keep_together():
    with pytest.raises(RecipeError, match="projection, with codes = weights that rules round"):
        replace(get_recipe("fp8lm-o2"), name="made", projection=Projection())
    with pytest.raises(
        RecipeError, match=r"moments: projector kept as dynamic8.*expected .* vectors in fp32, bf16 or fp16"
    ):
        replace(get_recipe("adamw-8bit"), name="made", projection=Projection())


def test_the_recipe_shows_it():
    assert "rank 128, at most 0.5 of the short side" in get_recipe("galore").describe()
    for name in PROJECTED:
        states = get_recipe(name).bytes_per_parameter(shape=(1024, 4096)).states
        assert f"states of a 1024 x 4096 matrix take {states:.4g} bytes a parameter" in " ".join(
            get_recipe(name).describe().split()
        )
