"""The fused CPU step of every rule equals its formula on torch tensors, for every storage, size and option."""

import subprocess
import sys
from dataclasses import replace
from itertools import product

import numba
import numpy as np
import pytest
import torch

from families import for_each, slow_unless
from halfstep import round_to
from halfstep.kernels.arithmetic import SQUARES, root, traced
from halfstep.kernels.cpu import optimizer as kernel
from halfstep.kernels.cpu.noise import chunk_keys, seed_keys
from halfstep.kernels.cpu.optimizer_loops import step_chunk
from halfstep.kernels.cpu.optimizer_types import placed
from halfstep.optim import Lamb, Lion, convert, update_rules
from halfstep.optim.rules import no_fused_update
from halfstep.optim.rules.adam import adamw
from halfstep.quant import noise_bits
from halfstep.recipe import DTYPES, Recipe, get_recipe, get_storage
from oracles.numbers import every_16_bit_value, same_bits


CHUNK = kernel.CHUNK
STORAGES = [
    {"weights": weights, "master": master, "moments": moments, "update_rounding": rounding}
    for weights, master, moments, rounding in product(DTYPES, (None, "fp32"), DTYPES, ("nearest_even", "stochastic"))
    if not (master and weights == "fp32") and (rounding == "nearest_even" or (weights == "bf16" and not master))
]
STORAGES += [
    {"weights": "bf16", "master": master, "moments": moments}
    for master, moments in [
        ("split", "fp32"), ("residue", "fp32"), ("kahan", "fp32"), ("collage", "bf16"),
        ("collage", (("exp_avg_sq", get_storage("bf16", residual=True)), ("*", "bf16"))),
    ]
]  # fmt: skip
OF_EVERY_KIND = [
    ("fp32", None, "fp32"), ("bf16", None, "fp32"), ("bf16", None, "bf16"), ("fp16", None, "fp16"),
    ("bf16", "fp32", "fp32"), ("fp16", "fp32", "bf16"),
]  # fmt: skip
"""(weights, master, moments) that the fast tests compile, besides storages with residuals."""
WITH_L2 = [("fp32", None, "fp32"), ("bf16", "fp32", "fp32"), ("bf16", "collage", "bf16")]
"""Those also tested with L2 weight decay, which is another kernel."""


def name_of(storage):
    return "-".join(str(value) for value in storage.values()) if isinstance(storage, dict) else storage.__name__


def dtypes_of(storage):
    return storage["weights"], storage["master"], storage["moments"]


def is_compiled(storage):
    return storage["master"] not in (None, "fp32") or dtypes_of(storage) in OF_EVERY_KIND


every_storage = pytest.mark.parametrize("storage", slow_unless(is_compiled, STORAGES), ids=name_of)
every_storage_and_class = pytest.mark.parametrize(
    ("storage", "torch_class"),
    slow_unless(
        lambda case: is_compiled(case[0]) and (case[1] is torch.optim.AdamW or dtypes_of(case[0]) in WITH_L2),
        product(STORAGES, [torch.optim.Adam, torch.optim.AdamW]),
    ),
    ids=name_of,
)
MIXED = {"weights": "bf16", "master": "fp32", "moments": "bf16", "update_rounding": "nearest_even"}


def pair(storage, weight, torch_class=torch.optim.AdamW, **options):
    """Two optimizers over equal weights: fused, and by the reference."""
    both = []
    for fused in (True, False):
        parameter = torch.nn.Parameter(weight.to(DTYPES[storage["weights"]], copy=True))
        recipe = Recipe("made", "", "", **storage)
        masters = {parameter: weight.float().clone()} if storage["master"] else {}
        optimizer = convert(torch_class([parameter], **{"lr": 1e-2, **options}), recipe, masters, generator=7)
        if not fused:
            optimizer.rule = replace(optimizer.rule, fused=no_fused_update)
        both.append((optimizer, parameter))
    return both


def assert_equal_steps(storage, weight, grads, torch_class=torch.optim.AdamW, scale=None, **options):
    (fused, w), (reference, v) = pair(storage, weight, torch_class, **options)
    for grad in grads:
        for optimizer, parameter in ((fused, w), (reference, v)):
            parameter.grad = grad.to(parameter.dtype)
            if scale:
                optimizer.grad_scale = torch.tensor(scale)
            optimizer.step()
        same_bits(w.detach(), v.detach())
        assert fused.state[w].keys() == reference.state[v].keys()
        for name, state in fused.state[w].items():
            same_bits(state, reference.state[v][name])
    return w, fused.state[w]


def run_arguments(n=64, dtype=torch.bfloat16):
    return [torch.randn(n).to(dtype), None, torch.randn(n).to(dtype), torch.zeros(n), torch.zeros(n)]


GROUP = {"lr": 0.03, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}


def run(weight, master, kept, grad, moments, seed, scale=1.0):
    """Run the kernel for AdamW's fourth update."""
    rounding = "nearest_even" if seed is None or weight.dtype != torch.bfloat16 else "stochastic"
    numbers = adamw.numbers(4, GROUP, scale)
    assert kernel.prepare(names_of(numbers.program), weight, master, kept, grad, moments, rounding)(grad, numbers, seed)


def names_of(program):
    return program.shared, program.moments


def prepared(*arguments):
    return kernel.prepare(names_of(adamw.numbers(1, GROUP, 1.0).program), *arguments)


def named(weight, master, grad, first, second):
    """The kernel's arguments from a weight, its fp32 master or None, a gradient and two moments."""
    kept = {} if master is None else {"master": master}
    kind = "none" if master is None else "fp32"
    return weight, kind, kept, grad, {"exp_avg": first, "exp_avg_sq": second}


@every_storage
@for_each("shape", [(0,), (0, 3), (), (1,), (7,), (13, 5), (CHUNK - 1,), (CHUNK,), (CHUNK + 1,)])
def test_every_storage_and_size_equals_the_reference(storage, shape):
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(shape, generator=generator) * 10.0**-k for k in range(3)]
    assert_equal_steps(storage, torch.randn(shape, generator=generator), grads, weight_decay=0.1)


@every_storage
def test_several_chunks_equal_the_reference(storage):
    generator = torch.Generator().manual_seed(2)
    grads = [torch.randn(3 * CHUNK + 5, generator=generator) for _ in range(2)]
    assert_equal_steps(storage, torch.randn(3 * CHUNK + 5, generator=generator), grads)


@every_storage
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_and_weights_equal_the_reference(storage, dtype):
    """NaN, infinities and subnormals included."""
    special = every_16_bit_value(dtype)[::13].float()
    ordinary = torch.linspace(-1, 1, special.numel())
    assert_equal_steps(storage, ordinary, [special, ordinary])
    assert_equal_steps(storage, special, [ordinary], weight_decay=0.1)


@every_storage
@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_nan_of_any_payload_stays_nan(storage, moment):
    """Rounding up a NaN whose payload is all ones would give zero, and dropping the lower half of others infinity."""
    codes = [0x7FFFFFFF, 0x7FFF8001, 0x7FC00000, 0x7F800001, -1, -0x7FFFFF]
    nans = torch.tensor(codes, dtype=torch.int32).view(torch.float32)
    (fused, w), (reference, v) = pair(storage, torch.ones(len(codes)), weight_decay=0.1)
    for optimizer, parameter in ((fused, w), (reference, v)):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        stored = optimizer.state[parameter][moment]
        upper = nans.view(torch.int16)[1::2]  # truncated: NaN or infinity
        stored.copy_(nans) if stored.dtype != torch.bfloat16 else stored.copy_(upper.view(torch.bfloat16))
        optimizer.step()
    same_bits(w.detach(), v.detach())
    for name, state in fused.state[w].items():
        same_bits(state, reference.state[v][name])
    if storage["master"] not in ("split", "residue"):  # their parts add up to the NaN, with a carry between them
        assert w[:3].isnan().all()


@every_storage_and_class
@for_each("options", [{"weight_decay": 0.1}, {"maximize": True}, {"betas": (0.0, 0.5)}, {"eps": 0.0, "lr": 1.0}])
def test_options_equal_the_reference(storage, torch_class, options):
    grads = [torch.randn(100), torch.zeros(100), torch.randn(100)]
    assert_equal_steps(storage, torch.randn(100), grads, torch_class, scale=3.0, **options)


OTHERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "descent": (torch.optim.SGD, {"maximize": True}),
    "nadam": (torch.optim.NAdam, {"weight_decay": 0.1}),
    "decoupled": (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "rmsprop": (torch.optim.RMSprop, {"weight_decay": 0.1}),
    "centered": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
    "lion": (Lion, {"weight_decay": 0.1}),
    "lamb": (Lamb, {"weight_decay": 0.1}),
}
RECIPES = ["fp32", "bf16-master", "bf16-stochastic", "bf16-split", "bf16-kahan", "bf16-collage-plus", "fp16-pure",
           "bf16-7byte", "fp8-adam", "adamw-8bit", "coat", "fp8-fishman"]  # fmt: skip
IN_TURN = [("nesterov", "bf16-master"), ("nadam", "bf16-stochastic"), ("centered", "fp32"), ("lion", "adamw-8bit"),
           ("lamb", "bf16-stochastic"), ("lamb", "adamw-8bit"), ("lamb", "fp8-fishman")]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "recipe"), slow_unless(IN_TURN.__contains__, product(OTHERS, RECIPES)), ids=lambda value: value
)
def test_every_rule_under_every_recipe_equals_the_reference(name, recipe):
    """Three steps of a tensor of several blocks and a rest, one step with infinities; and the kernel does run."""
    torch_class, options = OTHERS[name]
    generator, found = torch.Generator().manual_seed(3), []
    weight = torch.randn(4, 512, generator=generator)
    grads = [torch.randn(4, 512, generator=generator) * 10.0**-k for k in range(3)]
    grads[2][0, ::7] = torch.inf
    for fused in (True, False):
        own = get_recipe(recipe)
        parameter = torch.nn.Parameter(weight.to(DTYPES[own.weights], copy=True))
        masters = {parameter: weight.clone()} if own.master else {}
        optimizer = convert(torch_class([parameter], lr=1e-2, **options), own, masters, generator=7)
        if not fused:
            optimizer.rule = replace(optimizer.rule, fused=no_fused_update)
        for grad in grads:
            parameter.grad = grad.to(parameter.dtype)
            optimizer.step()
            assert [way.fused is not None for way in optimizer._together.ways] == [fused]
        found.append({"weight": parameter.detach(), **optimizer.state[parameter]})
    for key, tensor in found[1].items():
        same_bits(found[0][key], tensor)


def test_every_rule_but_muons_is_fused():
    assert {name for name, rule in update_rules().items() if rule.fused is no_fused_update} <= {"muon"}


LENGTHS = [0, 1, SQUARES - 1, SQUARES, SQUARES + 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, SQUARES * SQUARES + 2 * CHUNK]
ODD = [
    ("bf16", "fp32", "fp32"), ("bf16", "split", "fp32"), ("bf16", "residue", "fp32"), ("bf16", "kahan", "fp32"),
    ("bf16", "collage", "bf16"),
]  # fmt: skip
"""(weights, master, moments) with a master or residual whose norms the slow test computes."""
IN_FEW = {(1, ("fp32", None, "fp32")), (2, ("fp32", None, "fp32")), (1, ("bf16", "kahan", "fp32"))}
"""(threads, storage) of the fast test."""


@pytest.mark.parametrize(
    ("threads", "storage"),
    slow_unless(
        lambda one: (one[0], dtypes_of(one[1])) in IN_FEW,
        product((1, 2), [one for one in STORAGES if dtypes_of(one) in [*OF_EVERY_KIND, *ODD]]),
    ),
    ids=lambda one: str(one) if isinstance(one, int) else name_of(one),
)
@for_each("size", LENGTHS)
def test_norms_of_any_size_and_number_of_threads_equal_the_reference(threads, storage, size):
    """Of more blocks than one halving takes, of blocks with a rest, and of no block."""
    generator = torch.Generator().manual_seed(4)
    grads = [torch.randn(size, generator=generator) * 10.0**-k for k in range(2)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_equal_steps(storage, torch.randn(size, generator=generator), grads, Lamb, weight_decay=0.1, scale=3.0)
    finally:
        torch.set_num_threads(before)


@for_each("weight", [torch.zeros(100), torch.full((100,), 1e30), torch.full((100,), 1e-40)], ids=lambda w: str(w[0]))
@pytest.mark.parametrize("grads", [[0.0, 1.0], [torch.inf, 1.0], [torch.nan, 1.0], [1e-30, 1e25]], ids=str)
def test_norms_of_zero_and_nonfinite_tensors_equal_the_reference(weight, grads):
    """Zero gradients have no direction."""
    grads = [torch.cat([torch.zeros(50), torch.full((50,), grad)]) for grad in grads]
    assert_equal_steps(STORAGES[0], weight, grads, Lamb)


@every_storage
def test_a_step_changes_the_weight(storage):
    weight = torch.randn(100)
    moved, state = assert_equal_steps(storage, weight, [torch.ones(100)], lr=0.5)
    assert ((weight - moved.float()) > 0.4).all()
    assert (
        state["exp_avg"].dtype == state["exp_avg_sq"].dtype == Recipe("made", "", "", **storage).moment("exp_avg").dtype
    )


def test_the_kernel_equals_the_formula():
    """Without an optimizer in between."""
    weight, _, grad, first, second = run_arguments(1000, torch.float32)
    first, second = torch.randn(1000), torch.rand(1000)
    expected, moments = adamw.update(weight, grad * 0.5, {"exp_avg": first, "exp_avg_sq": second}, 4, GROUP)
    run(*named(weight, None, grad, first, second), None, 0.5)
    same_bits(weight, expected)
    same_bits(first, moments["exp_avg"])
    same_bits(second, moments["exp_avg_sq"])


@numba.njit
def one_chunk(rows, like, numbers, seed, chunk, size):
    """A Python-callable wrapper of a function that only kernels call."""
    rule, grad, weight, kept, moments = placed(like, rows, 0)
    step_chunk(rule, weight, kept, grad, moments, numbers, chunk_keys(seed, chunk), 0, 0, size)


@pytest.mark.parametrize("start", [0, 2**32 - CHUNK, 2**32, 5 * 2**32 + 3 * CHUNK, 2**46])
@pytest.mark.parametrize("seed", [0, 12345, 2**64 - 1])
def test_noise_equals_the_reference_at_any_index(start, seed):
    """One chunk of a tensor of more than 2^32 elements, without the tensor."""
    n = 1000
    gradient, stored = torch.randn(n), torch.zeros(n, dtype=torch.bfloat16)
    program = traced(lambda weight, grad, moments, options: (weight - grad, {}), [], [], [], {})
    updates, minus = kernel.Updates([(stored.view(torch.uint16).numpy(), (None,) * 5, ())], None), -gradient
    like = updates._with([minus], program.element)
    one_chunk(updates._rows, like, (np.float32(1),), seed_keys(seed), start // CHUNK, n)
    bits = gradient.view(torch.int32).long() & 0xFFFFFFFF
    rounded = (bits + (noise_bits(seed, start, n) >> 16) >> 16 << 16).to(torch.int32)
    expected = torch.where(rounded >= 2**31, rounded - 2**32, rounded).to(torch.int32).view(torch.float32)
    same_bits(stored.float(), expected)


def test_stochastic_rounding_equals_round_to_with_the_same_seed():
    weight, _, grad, first, second = run_arguments(CHUNK + 100)
    wide, moments = adamw.update(weight.float(), grad.float(), {"exp_avg": first, "exp_avg_sq": second}, 4, GROUP)
    run(*named(weight, None, grad, first, second), 99)
    same_bits(weight, round_to(wide, "bf16", "stochastic", "ieee", generator=99).bfloat16())
    same_bits(first, moments["exp_avg"])


def test_prepare_accepts_supported_tensors():
    plain = named(*run_arguments())
    assert prepared(*plain, "nearest_even")
    assert prepared(*plain, "stochastic")
    assert prepared(torch.nn.Parameter(plain[0]), *plain[1:], "nearest_even")


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("change", "rounding"),
    [
        ({0: torch.randn(64, 2).bfloat16()[:, 0]}, "nearest_even"),
        ({2: torch.randn(8, 8).bfloat16().t()}, "nearest_even"),
        ({1: torch.randn(64, 2)[:, 0]}, "nearest_even"),
        ({0: torch.randn(64).half()}, "stochastic"),
        ({0: torch.randn(64)}, "stochastic"),
        ({}, "toward_zero"),
        ({0: torch.randn(64).double()}, "nearest_even"),
        ({2: torch.zeros(64).to_sparse()}, "nearest_even"),
        ({0: torch.zeros(64, device="meta")}, "nearest_even"),
        ({2: torch.zeros(64).as_subclass(Subclass)}, "nearest_even"),
    ],
)
def test_prepare_refuses_unsupported_tensors(change, rounding):
    tensors = [change.get(i, tensor) for i, tensor in enumerate(run_arguments())]
    assert not prepared(*named(*tensors), rounding)


def test_unsupported_tensors_are_updated_by_the_reference():
    """A transposed weight and an expanded gradient give the result of contiguous ones."""
    results = []
    for weight in (torch.arange(12.0).view(3, 4).t(), torch.arange(12.0).view(3, 4).t().contiguous()):
        parameter = torch.nn.Parameter(weight)
        optimizer = convert(torch.optim.AdamW([parameter]), Recipe("made", "", ""), {})
        parameter.grad = torch.ones(1).expand(4, 3)
        optimizer.step()
        results.append(parameter.detach())
    same_bits(results[0].contiguous(), results[1])


FORKED = """
import os, numpy, torch
from halfstep.kernels.cpu import optimizer as kernel
from halfstep.optim.rules.adam import adamw
def run():  # numpy makes the tensors: torch's own threads do not survive a fork either
    weight, grad, first, second = (torch.from_numpy(numpy.ones(4 * kernel.CHUNK, numpy.float32)) for _ in range(4))
    moments = {"exp_avg": first, "exp_avg_sq": second}
    numbers = adamw.numbers(1, {"lr": 1e-2, "betas": (.9, .99), "eps": 1e-8, "weight_decay": 0}, 1.0)
    names = numbers.program.shared, numbers.program.moments
    kernel.prepare(names, weight, "none", {}, grad, moments, "nearest_even")(grad, numbers, None)
    return weight[-1].item()
first = run()
if (child := os.fork()) == 0:
    os._exit(0 if run() == first else 3)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow  # the fast test is that of the data loader, in test_cpu_compiled.py
def test_a_forked_child_can_step():
    """GNU OpenMP aborts a child that starts threads after its parent has."""
    result = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "child 0", result.stderr


def test_the_references_root_does_not_depend_on_length():
    """torch's float32 square root does on CPUs, where long tensors take another path than short ones."""
    numbers = torch.rand(4000)
    whole = root(numbers)
    for i in range(0, 4000, 40):
        same_bits(root(numbers[i : i + 5]), whole[i : i + 5])
    same_bits(whole, torch.from_numpy(np.sqrt(numbers.double().numpy()).astype(np.float32)))


@pytest.mark.quick("1")
@pytest.mark.parametrize("threads", [1, 2])
def test_torchs_number_of_threads_is_used_and_unchanged(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight, _, grad, first, second = run_arguments(4 * CHUNK)
        run(*named(weight, None, grad, first, second), 5)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
