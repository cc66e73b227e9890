"""Tests that need a GPU: kernels' bits, CUDA graphs, steps without synchronization, shards; run by `make bench-gpu`.

Tests that also work on a CPU run there too, so that they are correct once they run on a GPU."""

import copy
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import halfstep
from halfstep import quant
from halfstep.kernels import selftest
from halfstep.kernels.selftest.case import compare, hard, outcome
from halfstep.lab.models.llama import Llama
from halfstep.ops.function import LastInput
from halfstep.ops.part import part_of
from halfstep.optim import AdamWFp8, LowBitAdamW, selftest as optim, states


HERE = torch.cuda.is_available()
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="no CUDA GPU here: `make bench-gpu` runs it")]
)
on_gpu = pytest.mark.parametrize("device", [GPU])
anywhere = pytest.mark.parametrize("device", [GPU, "cpu"])
KERNELS = (*selftest.GPU, *optim.GPU)
GRAPHED = ("bf16-mixed", "bf16-stochastic", "fp16-mixed", "fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block")
"""Recipes with rounding to nearest, whose step counts are on the GPU."""
DRAWN = ("nvfp4", "mxfp4-rht")
"""Recipes that draw noise and random signs in forward and backward."""
NATIVE = ("fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")
"""Recipes whose layers run natively by prepared kernels, on a GPU that supports their tiles."""
GALORE = {1: 0.1, 10: 0.02, 100: 0.02}
"""By the number of steps: the largest difference of a weight under GaLore from the CPU's, relative to the largest
change of a weight. Adam's first step has the same size for an entry of the projected gradient that is only rounding
error: one with the other sign moves weights by 0.04 to 0.09 of that."""
SILENT = (
    *GRAPHED, "fp32", "bf16-nomaster", "bf16-master", "bf16-split", "bf16-kahan", "bf16-collage-plus", "adamw-8bit",
    "fp8-adam", "fp8-fishman", "fp8lm-o1", "fp8lm-o2", "fp8lm-o3", "coat", "mxfp8", *DRAWN,
)  # fmt: skip
"""Recipes whose step reads no value back to the host."""


@on_gpu
@pytest.mark.parametrize("kernel", sorted({test.kernel for test in KERNELS}))
def test_every_kernel_equals_the_reference(kernel, device):
    """By the tests of `halfstep doctor`."""
    for test in KERNELS:
        if test.kernel == kernel:
            found = outcome(test, torch.device(device))
            assert found.passed, found


@anywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_of_a_result_is_written(device, dtype):
    x = hard(3 * 4096 + 5, dtype)
    for rounding in ("nearest_even", "stochastic"):
        seed = 7 if rounding == "stochastic" else None
        expected = quant.round_to(x, halfstep.formats.get("float8_e4m3fn"), rounding, "saturate", seed)
        codes = quant.encode(x, halfstep.formats.get("float8_e4m3fn"), rounding, "saturate", seed)
        for poison in (7, 113):
            out = torch.full_like(x, poison, device=device)
            found = halfstep.round_to(x.to(device), "float8_e4m3fn", rounding, generator=seed, out=out)
            assert compare(expected, found, f"values over {poison}", x) is None
            out = torch.full(x.shape, poison, dtype=torch.uint8, device=device)
            found = halfstep.encode(x.to(device), "float8_e4m3fn", rounding, generator=seed, out=out)
            assert compare(codes, found, f"codes over {poison}", x) is None


@anywhere
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "fp8_1x128", "fp8_128x128", "nvfp4", "mxfp4"])
def test_codes_and_scales_equal_the_references(device, name):
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected, found = quant.get_quantizer(name).quantize(x), halfstep.quantize(x.to(device), name)
    for key, tensor in expected.tensors.items():
        assert torch.equal(
            found.tensors[key].cpu().reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        ), key


def setup(recipe, device):
    """A small Llama under a recipe, its optimizer, and a step on fixed tokens."""
    torch.manual_seed(0)
    model = Llama(64, 32, 2, 128, 2).to(device)
    model, optimizer, scaler = halfstep.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe, generator=3
    )
    tokens = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(1)).to(device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return model, optimizer, step


def all_tensors(model, optimizer):
    """Copies of weights and optimizer states."""
    kept = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for number, parameter in enumerate(model.parameters()):
        kept |= {
            f"{number} {key}": value for key, value in optimizer.state[parameter].items() if torch.is_tensor(value)
        }
    return {name: tensor.clone() for name, tensor in kept.items()}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name].cpu(), expected[name].cpu())]
    assert not different, different


@on_gpu
@pytest.mark.parametrize("recipe", [*GRAPHED, *DRAWN])
def test_steps_replayed_from_a_cuda_graph_equal_eager_steps(recipe, device):
    warm, replays = 3, 4
    model, optimizer, step = setup(recipe, device)
    for _ in range(warm + replays):
        step()
    expected = all_tensors(model, optimizer)
    model, optimizer, step = setup(recipe, device)
    graph = captured(step, warm)
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(all_tensors(model, optimizer), expected)


@on_gpu
@pytest.mark.parametrize("recipe", ["bf16-stochastic", *DRAWN])
def test_eager_steps_and_replays_can_be_mixed(recipe, device):
    """With other draws from the generator in between."""
    warm, kinds = 3, (True, False, True, True, False)
    model, optimizer, step = setup(recipe, device)
    for _ in range(warm):
        step()
    for _ in kinds:
        step()
        torch.randperm(5)
    expected = all_tensors(model, optimizer)
    model, optimizer, step = setup(recipe, device)
    graph = captured(step, warm)
    for replayed in kinds:
        (graph.replay if replayed else step)()
        torch.randperm(5)
    assert_same_bits(all_tensors(model, optimizer), expected)


@on_gpu
@pytest.mark.parametrize("recipe", ["fp8-delayed", "bf16-stochastic"])
def test_graphed_steps_under_a_schedule_equal_eager_steps(recipe, device):
    def run(graphed):
        model, optimizer, step = setup(recipe, device)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        step = halfstep.GraphedStep(step, optimizer) if graphed else step
        for _ in range(7):
            step()
            schedule.step()
        return all_tensors(model, optimizer)

    assert_same_bits(run(graphed=True), run(graphed=False))


def captured(step, warm):
    """The CUDA graph of a step, captured after some eager ones."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(warm):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@on_gpu
@pytest.mark.parametrize("recipe", SILENT)
def test_a_step_does_not_synchronize(recipe, device):
    _, _, step = setup(recipe, device)
    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def two_steps(recipe, device):
    """Outputs, gradients and scaling states of two steps of two layers, by name."""
    available, why = halfstep.is_native_available(recipe, device, return_reason=True)
    if not available:
        pytest.skip(why)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 384), torch.nn.GELU(), torch.nn.Linear(384, 128)).to(device)
    halfstep.apply(model, recipe)
    left = {}
    for step, size in enumerate((1.0, 5.0)):
        x = (size * torch.randn(256, 256, device=device)).requires_grad_()
        y = model(x)
        y.square().mean().backward()
        halfstep.advance(model)
        grads = {f"{name}'s gradient": parameter.grad for name, parameter in model.named_parameters()}
        found = {"y": y.detach(), "x's gradient": x.grad, **grads, **dict(model.named_buffers())}
        left |= {f"step {step}, {name}": tensor.clone() for name, tensor in found.items()}
    return left


@on_gpu
@pytest.mark.parametrize("recipe", NATIVE)
def test_prepared_native_layers_equal_unprepared_ones(recipe, device, monkeypatch):
    """Compared with the path that decides at every call."""
    linear, taken = import_module("halfstep.ops.linear"), []
    ends = []
    for native in (linear.native_layer, lambda *_: None):
        monkeypatch.setattr(
            linear, "native_layer", lambda *given, native=native: taken.append(native(*given)) or taken[-1]
        )
        ends.append(two_steps(recipe, device))
    assert [layer is not None for layer in taken] == [True] * 4 + [False] * 4
    assert_same_bits(*ends)


@on_gpu
@pytest.mark.parametrize("recipe", NATIVE)
def test_layers_give_the_same_bits_with_any_previous_memory_contents(recipe, device):
    """No kernel reads unwritten memory, and programs of a launch do not race: repeated with freed memory filled with
    other bytes."""
    expected = two_steps(recipe, device)
    for turn in range(60):
        filled = [torch.full((1 << size,), turn * 37 % 256, dtype=torch.uint8, device=device) for size in range(9, 22)]
        del filled
        assert_same_bits(two_steps(recipe, device), expected)


@anywhere
@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
def test_layers_sharing_a_rounded_input_give_the_same_bits(recipe, device, monkeypatch):
    ends, taken, find = [], [], LastInput.find
    for found in (lambda *given: taken.append(find(*given)) or taken[-1], lambda *_: None):
        monkeypatch.setattr(LastInput, "find", found)
        model, optimizer, step = setup(recipe, device)
        for _ in range(2):
            step()
        ends.append(all_tensors(model, optimizer))
    assert any(made is not None for made in taken)
    assert_same_bits(*ends)


@on_gpu
def test_an_input_is_rounded_on_each_stream_that_reads_it(device):
    model, x = (
        torch.nn.Linear(256, 256, bias=False).to(device),
        torch.randn(256, 256, device=device, requires_grad=True),
    )
    halfstep.apply(model, "fp8-current")
    with halfstep.following(model):
        read, side = x * 2, torch.cuda.Stream()
        y, last = model(read), part_of(model).following.last_input
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(10**7)
            before = last._last[2]
            assert torch.equal(model(read), y)
            assert last._last[2] is not before
    torch.cuda.current_stream().wait_stream(side)


@anywhere
@pytest.mark.parametrize("recipe", ["bf16-stochastic", "fp8-current"])
def test_the_same_steps_give_the_same_bits(recipe, device):
    ends = []
    for _ in range(2):
        model, optimizer, step = setup(recipe, device)
        for _ in range(2):
            step()
        ends.append(all_tensors(model, optimizer))
    assert_same_bits(*ends)


def stepped(kind, weight, grads, rank=None):
    """A weight after steps with the given gradients: whole, or one of two shards of its rows with a fake process
    group."""
    options = {"lr": 1e-2, "bf16_stochastic_round": True, "generator": 11}
    if rank is None:
        parameter = torch.nn.Parameter(weight.clone())
        optimizer = kind([parameter], **options)
        for grad in grads:
            parameter.grad = grad.clone()
            optimizer.step()
        return parameter.detach()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        mesh = DeviceMesh(weight.device.type, [0, 1])

        def shard(tensor):
            return DTensor.from_local(tensor.chunk(2)[rank].clone(), mesh, [Shard(0)], run_check=False)

        parameter = torch.nn.Parameter(shard(weight))
        optimizer = kind([parameter], **options)
        for grad in grads:
            parameter.grad = shard(grad)
            optimizer.step()
        return parameter.detach().to_local()
    finally:
        dist.destroy_process_group()


@pytest.mark.quick("LowBitAdamW-cpu", "LowBitAdamW-cuda", "AdamWFp8-cuda")
@anywhere
@pytest.mark.parametrize("kind", [LowBitAdamW, AdamWFp8])
def test_two_shards_equal_the_unsharded_weight(kind, device, monkeypatch):
    monkeypatch.setattr(dist, "broadcast_object_list", lambda seeds, **group: None)  # each rank has the same seed
    drawn = torch.Generator().manual_seed(5)
    weight, *grads = (torch.randn(64, 256, generator=drawn).bfloat16().to(device) for _ in range(4))
    whole = stepped(kind, weight, grads)
    shards = torch.cat([stepped(kind, weight, copy.deepcopy(grads), rank) for rank in (0, 1)])
    assert torch.equal(shards, whole)
    assert not torch.equal(whole, weight)


def in_float64(monkeypatch):
    """Patch GaLore to another algorithm: singular vectors from a Gram matrix, and matmuls in float64."""

    def vectors(grad, subspace):
        gram = grad.double() @ grad.double().T if subspace.left else grad.double().T @ grad.double()
        found = torch.linalg.eigh(gram)[1].flip(1)[:, : subspace.rank]
        largest = found.gather(0, found.abs().argmax(0, keepdim=True))
        return (found * torch.where(largest < 0, -1.0, 1.0)).float().contiguous()

    def product(one, other):
        return (one.double() @ other.double()).float()

    own = states._Projected
    monkeypatch.setattr(states, "singular_vectors", vectors)
    monkeypatch.setattr(own, "down", lambda s, p, g: product(p.T, g) if s.subspace.left else product(g, p))
    monkeypatch.setattr(own, "up", lambda s, p, low: product(p, low) if s.subspace.left else product(low, p.T))


def galore(seed, device):
    """A small model under GaLore, with the same weights on any device."""
    torch.manual_seed(seed)
    layers = torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)
    model = torch.nn.Sequential(*layers).to(device)
    return halfstep.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "galore", generator=3)


@pytest.mark.quick("0-cpu", "0-cuda", "1-cuda", "2-cuda")
@anywhere
@pytest.mark.parametrize("seed", range(3))
def test_galore_stays_within_the_stated_tolerance(device, seed, monkeypatch):
    """With the same gradients, so that only the algorithm for singular vectors and the order of sums differ."""
    steps, data = tuple(GALORE), torch.Generator().manual_seed(seed + 1)
    grads, ends = [], []
    model, optimizer, scaler = galore(seed, "cpu")
    begun = [p.detach().clone() for p in model.parameters()]
    for number in range(1, steps[-1] + 1):
        x, y = torch.randn(128, 32, generator=data), torch.randn(128, 8, generator=data)
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
        if number in steps:
            ends.append([p.detach().clone() for p in model.parameters()])
    if device == "cpu":
        in_float64(monkeypatch)
    twin, optimizer, _ = galore(seed, device)
    for number, given in enumerate(grads, 1):
        for parameter, grad in zip(twin.parameters(), given, strict=True):
            parameter.grad = grad.to(device)
        optimizer.step()
        if number in steps:
            expected = ends[steps.index(number)]
            moved = max((end - start).abs().max() for end, start in zip(expected, begun, strict=True))
            found = [p.detach().cpu() for p in twin.parameters()]
            apart = max((one - other).abs().max() for one, other in zip(found, expected, strict=True))
            print(f"seed {seed}, step {number}: {apart / moved:.1e} of the farthest way")
            assert 0 < apart < GALORE[number] * moved
