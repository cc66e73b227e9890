"""Multi-tensor steps on a GPU: what is launched, when pointer tables are rebuilt, and that the host reads no value.

Launches are recorded, not run; their results are tested in Triton's interpreter (`tests/gpu`)."""

import itertools
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import OptimizerError
from halfstep.kernels.gpu import kinds, optimizer, table
from halfstep.optim import convert, rule_of
from halfstep.optim.shards import positions, run_of
from halfstep.optim.stepping import StepPlan
from halfstep.recipe import get_recipe


@pytest.fixture
def launches(monkeypatch):
    made = []
    kernels = {name: name for name in ("prepare", "square", "norm", "update")}
    made_up = SimpleNamespace(**kernels, made=lambda source, *program: id(program))
    monkeypatch.setattr(optimizer, "functions", lambda name: made_up)
    monkeypatch.setattr(
        optimizer, "prepared", lambda kernel, *_, **__: lambda grid, *rest: made.append((kernel, grid, *rest))
    )
    return made


def stepped(recipe="fp32", make=torch.optim.AdamW, sizes=(3, 2000, 5000), **options):
    """An optimizer after a step whose launches are not run, so that its step counts stay 0."""
    dtype = torch.bfloat16 if recipe.startswith("bf16") else torch.float32
    parameters = [nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    low = convert(make(groups, **{"lr": 1e-2, **options}), get_recipe(recipe), {}, 7)
    low._together = StepPlan(anywhere=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    low.step()
    return low, parameters


def steps_of(low):
    (steps,) = low._together._steps.values()
    return steps


@pytest.mark.parametrize(
    ("recipe", "make", "options", "kinds"),
    [
        ("fp32", torch.optim.AdamW, {}, 1),
        ("bf16-stochastic", torch.optim.AdamW, {}, 1),
        ("fp32", torch.optim.SGD, {}, 1),
        ("adamw-8bit", torch.optim.AdamW, {}, 2),  # moments of small tensors are in fp32
    ],
)
def test_launches_are_one_prepare_and_one_update_per_kind(launches, recipe, make, options, kinds):
    low, _ = stepped(recipe, make, **options)
    assert [kernel for kernel, *_ in launches] == ["prepare"] + ["update"] * kinds
    assert sum(grid for kernel, grid, *_ in launches if kernel == "update") == 1 + 2 + 5
    assert low._together.all


def test_lambs_norms_are_launched_between_prepare_and_update(launches):
    """Partial sums for each block, then norms for each tensor with blocks, from the index of its first sum."""
    low, _ = stepped(make=halfstep.optim.Lamb, sizes=(3, 0, 2000, 5000))
    assert [(kernel, grid) for kernel, grid, *_ in launches] == [
        ("prepare", 1),
        ("square", 8),
        ("norm", 3),
        ("update", 8),
    ]
    assert launches[2][3].tolist() == [[0, 0], [2, 1], [3, 3]]
    assert launches[1][5].shape == (8, 2)
    assert low._together.all


def test_a_repeated_step_reuses_the_tables_with_new_gradient_pointers(launches, monkeypatch):
    low, parameters = stepped()
    before = steps_of(low)
    monkeypatch.setattr(type(low), "check", lambda self: pytest.fail("the optimizer was checked again"))
    for parameter in parameters:
        parameter.grad = parameter.grad.clone()
    low.step()
    assert steps_of(low) is before
    assert before._rows[:, table.GRAD].tolist() == [p.grad.data_ptr() for p in parameters]
    assert before._rows[:, table.WEIGHT].tolist() == [p.data_ptr() for p in parameters]
    assert [kernel for kernel, *_ in launches] == ["prepare", "update"] * 2


def replace_weight(low, parameters):
    parameters[0].data = parameters[0].data.clone()


def resize_weight(low, parameters):
    parameters[0].data = torch.ones(4)
    parameters[0].grad = torch.ones(4)
    low.state[parameters[0]].clear()


def replace_moment(low, parameters):
    low.state[parameters[0]]["exp_avg"] = torch.zeros(3)


def replace_state(low, parameters):
    low.state[parameters[0]] = dict(low.state[parameters[0]])


def drop_gradient(low, parameters):
    parameters[0].grad = None


def narrow_gradient(low, parameters):
    low.param_groups[0]["params"] = [nn.Parameter(torch.ones(3))]
    low.param_groups[0]["params"][0].grad = torch.ones(3)


def transpose_gradient(low, parameters):
    parameters[0].grad = torch.ones(1).expand(3)


def unalign_gradient(low, parameters):
    parameters[1].grad = torch.ones(2001)[1:]


def replace_group(low, parameters):
    low.param_groups[1] = {**low.param_groups[1], "lr": 0.5}


def add_group(low, parameters):
    low.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def change_seed(low, parameters):
    low.param_groups[0]["rounding_seed"] = 8


def load(low, parameters):
    low.load_state_dict(low.state_dict())
    low._together._anywhere = True


@pytest.mark.quick(
    "replace_state", "drop_gradient", "narrow_gradient", "transpose_gradient", "unalign_gradient", "add_group"
)
@pytest.mark.parametrize(
    "change",
    [replace_weight, resize_weight, replace_moment, replace_state, drop_gradient, narrow_gradient,
     transpose_gradient, unalign_gradient, replace_group, add_group, change_seed, load],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_tables_are_rebuilt_after_any_other_change(launches, change):
    low, parameters = stepped()
    before = steps_of(low)
    change(low, parameters)
    low.step()
    assert steps_of(low) is not before
    held = [p for group in low.param_groups for p in group["params"] if p.grad is not None and p.grad.is_contiguous()]
    assert steps_of(low)._rows[:, table.WEIGHT].tolist() == [p.data_ptr() for p in held]


def load_on_cpu(low, parameters):
    low.load_state_dict(low.state_dict())


def on_cpu(recipe="fp32", make=torch.optim.AdamW):
    """An optimizer after a step on a CPU."""
    parameters = [nn.Parameter(torch.linspace(-1, 1, size)) for size in (3, 2000)]
    low = convert(make([{"params": [p]} for p in parameters], lr=1e-2), get_recipe(recipe), {}, 7)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    low.step()
    return low, parameters


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop])
def test_a_repeated_step_on_a_cpu_checks_nothing_again(monkeypatch, make):
    low, parameters = on_cpu(make=make)
    monkeypatch.setattr(type(low), "check", lambda self: pytest.fail("the optimizer was checked again"))
    parameters[0].grad = torch.ones(3)
    low.param_groups[0]["lr"] = 0.5
    low.step()
    assert [int(low.state[p]["step"]) for p in parameters] == [2, 2]
    assert parameters[0][0] < -1.4


@pytest.mark.parametrize(
    "change",
    [replace_weight, resize_weight, replace_moment, replace_state, drop_gradient, narrow_gradient,
     transpose_gradient, unalign_gradient, replace_group, add_group, load_on_cpu],
    ids=lambda change: change.__name__,
)  # fmt: skip
@pytest.mark.parametrize("recipe", ["fp32", "adamw-8bit"])
def test_a_step_on_a_cpu_notices_any_change(change, recipe):
    found = []
    for again in (True, False):
        low, parameters = on_cpu(recipe)
        change(low, parameters)
        if not again:
            low._together._unmoved = None
        low.step()
        found.append([value for p in low.param_groups for w in p["params"] for value in (w, *low.state[w].values())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_weight_shortened_at_the_same_address_is_noticed():
    low, (first, _) = on_cpu()
    first.data = first.data[:2]
    first.grad = torch.ones(2)
    low.state[first].clear()
    low.step()
    assert low.state[first]["exp_avg"].shape == (2,)


def test_a_weight_transposed_at_the_same_address_is_noticed():
    found = []
    for turned in (False, True):
        weight = nn.Parameter(torch.arange(9.0).view(3, 3))
        low = convert(torch.optim.SGD([weight], lr=1.0), get_recipe("fp32"), {}, 7)
        weight.grad = torch.zeros(3, 3)
        low.step()
        weight.data = weight.data.t() if turned else weight.data.t().contiguous()
        weight.grad = torch.arange(9.0).view(3, 3)
        low.step()
        found.append(weight.detach())
    assert torch.equal(*found)
    assert found[0][0, 1] == 3.0 - 1.0


def test_the_optimizer_holds_no_reference_to_gradients():
    low, parameters = on_cpu()
    gone = weakref.ref(parameters[0].grad)
    low.zero_grad()
    assert gone() is None


def test_a_tensor_without_a_kernel_is_stepped_by_the_reference(launches):
    low, parameters = stepped()
    transpose_gradient(low, parameters)
    low.step()
    assert not low._together.all
    assert [low.state[p]["step"].item() for p in parameters] == [1, 0, 0]  # the others' launches are not run
    assert (parameters[0] < 1).all()


def test_learning_rates_and_betas_are_updated_in_the_table(launches):
    low, _ = stepped(weight_decay=0.25)
    before = steps_of(low)
    rows = before._table
    low.param_groups[1].update(lr=0.5, betas=(0.5, 0.75))
    low.step()
    assert steps_of(low) is before
    assert before._table is rows
    sign, at, count, *given = rows[1].tolist()
    assert sign == 1.0
    assert given[:5] == [0.5, 0.5, 0.75, 0.25, 1e-8]
    found = before._by_step[int(at) :][: 2 * int(count)].view(-1, 2)
    assert found[:3, 0].tolist() == [0.5, 0.75, 0.875]
    assert found[-1].tolist() == [1, 1]


def test_an_option_that_needs_another_kernel_rebuilds_the_launches(launches):
    low, _ = stepped(make=torch.optim.Adam)
    before = steps_of(low)
    low.param_groups[0]["weight_decay"] = 0.1
    low.step()
    assert steps_of(low) is not before
    assert [kernel for kernel, *_ in launches] == ["prepare", "update", "prepare", "prepare", "update", "update"]


def test_a_gradient_with_torchs_negative_bit_is_stepped_by_the_reference(launches):
    low, parameters = stepped(sizes=(1, 2000))
    for plain, number in [(True, torch.tensor([1 + 2j])), (False, torch.tensor([1 + 2j]).conj())]:
        parameters[0].grad = number.imag
        assert parameters[0].grad.is_contiguous()
        low.step()
        assert low._together.all == plain
    assert parameters[0] > 1


def coded(recipe):
    """A model with weights stored as codes and its optimizer, after two steps whose launches are not run."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    model, low, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), recipe=recipe)
    low._together = StepPlan(anywhere=True)
    for _ in range(2):
        scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        scaler.step(low)
        scaler.update()
    assert low._together.all
    return model, low


@pytest.mark.parametrize("name", ["codes", "scale"])
def test_tables_are_rebuilt_if_a_weights_codes_or_scale_are_replaced(launches, name):
    model, low = coded("fp8lm-o2")
    before, weight = steps_of(low), model[0].weight
    low.step()
    assert steps_of(low) is before
    setattr(weight, name, getattr(weight, name).clone())
    low.step()
    assert steps_of(low) is not before
    column = table.WEIGHT if name == "codes" else table.WEIGHT_SCALE
    assert steps_of(low)._rows[0, column] == getattr(weight, name).data_ptr()


def test_only_masters_of_written_weights_follow(launches, monkeypatch):
    model, low = coded("fp8lm-o3")
    followed = []
    monkeypatch.setattr(type(low), "follow", lambda self, parameter: followed.append(parameter))
    low.step()
    with torch.no_grad():
        model[1].weight.mul_(2)
    low.step()
    low.step()
    assert [parameter is model[1].weight for parameter in followed] == [True]


def options_of(make=torch.optim.AdamW, **options):
    """The options of a group that GPU kernels get."""
    built = make([nn.Parameter(torch.ones(4))], **options)
    return rule_of(built).options(built.param_groups[0])


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95, 0.999])
def test_bias_corrections_in_the_table_equal_the_hosts(beta):
    rows = options_of(betas=(beta, beta)).rows
    for step in [*range(1, 50), len(rows) - 1, len(rows), len(rows) + 1, 10 * len(rows), 2**24]:
        if step:
            assert rows[min(step, len(rows)) - 1] == (1 - beta**step, 1 / math.sqrt(1 - beta**step))


def test_unsupported_betas_strides_and_roundings_have_no_kernel():
    weight, number = torch.ones(4), torch.zeros(())
    tensors = kinds.Tensors(weight, weight, number, "none", {}, (weight, weight), None, "nearest_even", None, 0, 0, 0)
    usual = options_of(betas=(0.9, 0.99))
    assert kinds.kind_of(tensors, options_of(betas=(0.9, 0.9999))) is not None
    assert kinds.kind_of(tensors, options_of(betas=(0.9, 1 - 1e-9))) is None
    assert kinds.kind_of(tensors._replace(grad=torch.ones(8)[::2]), usual) is None
    assert kinds.kind_of(tensors._replace(rounding="stochastic"), usual) is None
    assert kinds.kind_of(tensors._replace(moments=(weight, weight, weight)), usual) is None


@pytest.mark.parametrize("warm", [False, True])
def test_a_step_reads_no_value_on_the_host(launches, monkeypatch, warm):
    low, parameters = stepped()
    if not warm:
        low._together = StepPlan(anywhere=True)
    low.grad_scale, low.found_inf = torch.tensor(8.0), torch.tensor(1.0)
    versions = [p._version for p in parameters]
    for name in ("item", "__float__", "__bool__", "__int__", "tolist", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, name=name: pytest.fail(f"{name} of a tensor"))
    low.step()
    monkeypatch.undo()
    assert launches[-2][-3:-1] == (low.grad_scale, low.found_inf)
    assert [p._version for p in parameters] == [version + 1 for version in versions]


def test_a_watched_step_uses_the_reference(launches):
    low, parameters = stepped()
    launches.clear()
    seen = []
    with low.watched(seen.append):
        low.step()
    assert len(seen) == len(parameters)
    assert not launches


def test_a_capturable_group_is_accepted_only_on_a_gpu():
    rule = convert(torch.optim.AdamW([nn.Parameter(torch.ones(2))]), get_recipe("fp32"), {}).rule
    rule.check({"capturable": True, "params": [SimpleNamespace(is_cuda=True)]})
    for parameters in ([], [SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)]):
        with pytest.raises(OptimizerError, match="step count on the host"):
            rule.check({"capturable": True, "params": parameters})


def test_a_capturable_group_with_a_tensor_without_a_kernel_is_refused(launches, monkeypatch):
    low, parameters = stepped()
    monkeypatch.setattr(type(low.rule), "check", lambda self, group: None)
    low.param_groups[0]["capturable"] = True
    transpose_gradient(low, parameters)
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(OptimizerError, match=r"parameter 0 of shape .* capturable"):
        low.step()
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))


class Sharded:
    """The part of a sharded tensor's interface that is used."""

    device = torch.device("cpu")

    def __init__(self, shape, placements, mesh, ranks):
        self.shape, self.placements = shape, placements
        self.device_mesh = SimpleNamespace(
            shape=mesh, size=lambda axis: mesh[axis], get_local_rank=lambda axis: ranks[axis]
        )

    def dim(self):
        return len(self.shape)


def shard(dim):
    return SimpleNamespace(dim=dim, is_replicate=lambda: False, is_shard=lambda: True)


@pytest.mark.parametrize("shape", [(7,), (5, 6), (3, 4, 5), (2, 3)])
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (1, 2)])
def test_run_of_describes_a_shards_elements_by_start_run_and_stride(shape, dims):
    if max(dims) >= len(shape):
        pytest.skip("no such dimension")
    mesh, found = (4, 2)[: len(dims)], 0
    for ranks in itertools.product(*map(range, mesh)):
        tensor = Sharded(shape, [shard(dim) for dim in dims], mesh, ranks)
        index, place = positions(tensor), run_of(tensor)
        if place is None:
            assert dims == (1, 2)
            continue
        expected = torch.arange(math.prod(shape)) if index is None else index.flatten()
        i = torch.arange(expected.numel())
        start, run, stride = place
        assert torch.equal(start + i // run * stride + i % run, expected)
        found += expected.numel()
    assert found or dims == (1, 2)
