"""Native matmuls with tile scales: the operands handed to torch, decoded the way the hardware reads them.

Without a GPU: `emulated` takes the arguments of `torch.nn.functional.scaled_mm`, checks them against the shapes and
strides that PyTorch's ScaledBlas.cpp requires, and multiplies in float64."""

import re

import mmaemu
import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import halfstep
from families import for_each
from halfstep import formats, get_quantizer, ops
from halfstep.kernels import probes, scaled_mm, units_mm
from halfstep.kernels.selftest import matrices
from halfstep.kernels.selftest.case import outcome
from halfstep.ops import sides
from halfstep.ops.linear_passes import Rounded
from halfstep.ops.sides import goes_both_ways, tensor_cores_of
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import ROW, TENSOR, square
from halfstep.recipe import get_recipe, linear_spec, list_recipes


to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _newest(monkeypatch):
    """A torch of any version, built with any CUDA."""
    monkeypatch.setattr(scaled_mm, "_torch", lambda: (99, 0))
    monkeypatch.setattr(scaled_mm, "_toolkit", lambda: (99, 0))


CPU, E4, E5 = torch.device("cpu"), "float8_e4m3fn", "float8_e5m2"
KINDS = torch.nn.functional.ScalingType
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def up(size, multiple):
    return -(-size // multiple) * multiple


def decoded(codes):
    """The values of row-major codes (rows, shared)."""
    if codes.dtype != torch.float4_e2m1fn_x2:
        return codes.double()
    packed = codes.view(torch.uint8).long()
    halves = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    return E2M1[halves & 7] * (1 - 2 * (halves >> 3))


def checked(rows, shared, scale, kind, swizzle):
    """Check the scale of one side as PyTorch does: dtype, shape and strides."""
    kinds, scales, orders = (v if isinstance(v, list) else [v] for v in (kind, scale, swizzle))
    first, name = scales[0], kinds[0].name
    across = -(-shared // 128)
    if name == "TensorWise":
        assert (first.dtype, first.numel()) == (torch.float32, 1)
    elif name == "RowWise":
        assert (first.dtype, first.numel(), first.stride(-1)) == (torch.float32, rows, 1)
    elif name == "BlockWise1x128":
        assert (first.dtype, first.shape, first.stride(0)) == (torch.float32, (rows, across), 1)
        assert first.stride(1) == rows or (across, first.stride(1)) == (1, 1)
    elif name == "BlockWise128x128":
        high = up(across, 4)
        assert (first.dtype, first.shape, first.stride(0)) == (torch.float32, (high, -(-rows // 128)), 1)
        assert first.stride(1) == high or (first.shape[1], first.stride(1)) == (1, 1)
    else:
        size = {"BlockWise1x32": 32, "BlockWise1x16": 16}[name]
        assert first.shape == (up(rows, 128) * up(-(-shared // size), 4),)
        assert first.is_contiguous()
        assert first.dtype == {32: torch.float8_e8m0fnu, 16: torch.float8_e4m3fn}[size]
        assert orders[0].name == "SWIZZLE_32_4_4"
        if size == 16:
            assert (scales[1].dtype, scales[1].numel()) == (torch.float32, 1)
            assert (kinds[1].name, orders[1].name) == ("TensorWise", "NO_SWIZZLE")
    return name, scales


def scale_per_element(rows, shared, name, scales):
    """Each element's scale, (rows, shared), found by the index that the hardware uses."""
    r, k = torch.arange(rows)[:, None], torch.arange(shared)
    if name == "TensorWise":
        return scales[0].double().expand(rows, shared)
    if name == "RowWise":
        return scales[0].double().view(rows, 1).expand(rows, shared)
    if name == "BlockWise1x128":
        return scales[0].double()[r, k // 128]
    if name == "BlockWise128x128":
        return scales[0].double()[k // 128, r // 128]
    size = 32 if name == "BlockWise1x32" else 16
    c, wide = k // size, -(-shared // size)
    places = ((r // 128) * -(-wide // 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
    if size == 32:
        return 2.0 ** (scales[0].view(torch.uint8).double()[places] - 127)
    return scales[0].float().double()[places] * scales[1].double()


def seen(a, b, scale_a, kind_a, scale_b, kind_b, swizzle_a=None, swizzle_b=None, **_):
    """Check all arguments; return the scaling kinds of both sides and the sizes."""
    rows, across, packed = a.shape[0], b.shape[1], 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
    shared = a.shape[1] * packed
    assert a.stride(1) == 1
    assert b.stride(0) == 1
    assert b.shape[0] == a.shape[1]
    assert shared % 16 == 0
    assert across % 16 == 0
    assert {a.dtype, b.dtype} != {torch.float8_e5m2}
    one = checked(rows, shared, scale_a, kind_a, swizzle_a)
    return one, checked(across, shared, scale_b, kind_b, swizzle_b), (rows, shared, across)


@pytest.fixture
def fp8_gpu(monkeypatch):
    """This CPU as a GPU whose tensor cores multiply in float64: a dict with its capability, to be set, and the
    calls."""
    calls = {"capability": (9, 0), "kinds": []}

    def emulated(a, b, *args, bias=None, output_dtype=torch.bfloat16, **kwargs):
        assert "use_fast_accum" not in kwargs
        one, other, (rows, shared, across) = seen(a, b, *args, **kwargs)
        calls["kinds"].append((one[0], other[0]))
        lhs, rhs = (
            decoded(a) * scale_per_element(rows, shared, *one),
            decoded(b.t()) * scale_per_element(across, shared, *other),
        )
        y = lhs @ rhs.t()
        return (y if bias is None else y + bias.double()).to(output_dtype)

    def capability(device):
        return calls["capability"]

    capability._dynamo_marked_constant = True  # as the real function is
    monkeypatch.setattr(scaled_mm, "capability", capability)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", emulated)
    return calls


def squares(name, size, scaling):
    return Quantizer(formats.get(name), scales=Scales(square(size), get_scaling(scaling)))


E8M0 = {name: get_quantizer(name, scale="rceil") for name in ("fp8_1x128", "fp8_128x128", "mxfp8_e4m3")}
FOUR_OVER_SIX = get_quantizer("nvfp4", scale="four_over_six")
TILED = {
    "fp8-block": ((9, 0), (E8M0["fp8_1x128"], E8M0["fp8_128x128"], E8M0["fp8_1x128"])),
    "fp8-block, float32 scales": ((9, 0), tuple(map(get_quantizer, ("fp8_1x128", "fp8_128x128", "fp8_1x128")))),
    "1x128 everywhere": ((9, 0), (E8M0["fp8_1x128"],) * 3),
    "mxfp8": ((10, 0), (E8M0["mxfp8_e4m3"],) * 3),
    "mxfp8, E5M2 gradients": ((10, 0), (E8M0["mxfp8_e4m3"],) * 2 + (get_quantizer("mxfp8_e5m2"),)),
    "nvfp4": ((10, 0), (get_quantizer("nvfp4"), squares("e2m1fn", 16, "two_level"), get_quantizer("nvfp4"))),
    "nvfp4, 4 over 6": ((10, 0), (FOUR_OVER_SIX, squares("e2m1fn", 16, "four_over_six"), FOUR_OVER_SIX)),
}


@for_each("name", list(TILED))
def test_native_matmuls_with_tile_scales_match_exact_ones(name, fp8_gpu):
    capability, quantizers = TILED[name]
    fp8_gpu["capability"] = capability
    fp8_gpu["kinds"].clear()
    given = draw(256, 384), draw(128, 384, seed=1), draw(256, 128, seed=2)
    x, w, dy = (t.to(torch.bfloat16) for t in given)
    x, w, bias = x.requires_grad_(), w.requires_grad_(), draw(128, seed=3).bfloat16()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = ops.linear(x, w, bias, linear_spec(*quantizers))
    y.backward(dy)
    assert len(fp8_gpu["kinds"]) == 3
    # Saved for backward are codes of a byte or half a byte per element, and no 16-bit copy of x or w.
    assert not [t for t in kept if t.dtype == torch.bfloat16 and t.numel() > 128]

    def rounded(t, quantizer):
        return quantizer.quantize(t.detach().contiguous()).dequantize(torch.float64)

    of_x, of_w, of_dy = quantizers
    plus = bias.double()
    for found, exact in (
        (y.detach(), rounded(x, of_x) @ rounded(w, of_w).t() + plus),
        (x.grad, rounded(dy, of_dy) @ rounded(w.t(), of_w).t()),
        (w.grad, rounded(dy.t(), of_dy) @ rounded(x.t(), of_x).t()),
    ):
        # The reference rounds a float32 scale times an element once; native matmuls do not.
        torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=2.0**-12)
        assert (found == exact.to(torch.bfloat16)).double().mean() > 0.99


SHAPES = {"a shared side": (256, 200, 128), "columns": (256, 384, 72), "rows": (250, 384, 128), "none": (0, 384, 128)}


@for_each("what", list(SHAPES), fast=["a shared side", "none"])
def test_unsupported_sizes_are_emulated(what, fp8_gpu):
    """Bit for bit as on a machine without FP8 tensor cores."""
    rows, fan_in, fan_out = SHAPES[what]
    given = draw(rows, fan_in), draw(fan_out, fan_in, seed=1), draw(rows, fan_out, seed=2)
    for name, (capability, quantizers) in TILED.items():
        results = []
        for here in ((0, 0), capability):
            fp8_gpu["capability"] = here
            x, w, dy = (t.to(torch.bfloat16) for t in given)
            x, w = x.requires_grad_(), w.requires_grad_()
            fp8_gpu["kinds"].clear()
            y = ops.linear(x, w, None, linear_spec(*quantizers))
            called = len(fp8_gpu["kinds"])
            y.backward(dy)
            results.append((y.detach(), x.grad, w.grad))
        takes = [scaled_mm.misfit(*quantizers[:2], (rows, fan_in, fan_out)) is None]
        assert called == sum(takes), name
        for one, other, calls in zip(*results, (called, None, None), strict=True):
            if not fp8_gpu["kinds"] or calls == 0:
                assert torch.equal(one, other), name
            else:
                torch.testing.assert_close(one, other, rtol=2.0**-7, atol=2.0**-7)


def test_unsupported_pairs_of_operands_are_refused(monkeypatch):
    monkeypatch.setattr(scaled_mm, "capability", lambda device: (9, 0))
    row, whole, rows = get_quantizer("fp8_1x128"), get_quantizer("fp8_128x128"), Quantizer(
        formats.get(E4), scales=Scales(ROW, get_scaling("rceil"))
    )  # fmt: skip
    five = Quantizer(formats.get(E5), scales=Scales(TENSOR, get_scaling("current")))
    assert "no such pair" in scaled_mm.product_refusal(whole, whole, CPU)
    assert "no such pair" in scaled_mm.product_refusal(row, rows, CPU)
    assert "E5M2 times E5M2" in scaled_mm.product_refusal(five, five, CPU)
    assert "not rounded" in scaled_mm.product_refusal(row, None, CPU)
    assert scaled_mm.product_refusal(row, whole, CPU) is None
    assert scaled_mm.product_refusal(whole, row, CPU) is None
    monkeypatch.setattr(scaled_mm, "_toolkit", lambda: (12, 8))
    assert "built with CUDA 12.9 or newer on compute capability 9.0; 12.8 found" in scaled_mm.product_refusal(
        row, whole, CPU
    )


def test_recipes_with_tiles_are_native_on_the_right_capabilities(monkeypatch):
    for capability, native in (((9, 0), {"fp8-block"}), ((10, 0), {"mxfp8", "nvfp4"}), ((12, 0), {"mxfp8"})):
        monkeypatch.setattr(scaled_mm, "capability", lambda device, found=capability: found)
        found = {name for name in ("fp8-block", "mxfp8", "nvfp4") if halfstep.is_native_available(name)}
        assert found == native


@for_each("shape", [(256, 12), (1, 1), (128, 4), (300, 7)])
def test_swizzled_scales_equal_torchaos(shape):
    scales = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int64).to(torch.uint8)
    assert torch.equal(units_mm.swizzled(scales), to_blocked(scales).flatten())


def test_scales_with_the_required_strides_are_not_copied():
    laid = draw(3, 40).t()
    assert units_mm.outer(laid).data_ptr() == laid.data_ptr()


@for_each("name", [name for name in matrices.TENSOR_CORE_OPERANDS if not name.startswith("float8")])
def test_doctor_detects_a_wrong_scale_layout(name, fp8_gpu, monkeypatch):
    """It runs the matmuls that layers would run natively, and no others."""
    fp8_gpu["capability"] = (10, 0) if "x" not in name.replace("mx", "") else (9, 0)
    stock, made = scaled_mm.run_tiled, []

    def watched(lhs, rhs, *rest):
        made.append(stock(lhs, rhs, *rest))
        return made[-1]

    monkeypatch.setattr(scaled_mm, "run_tiled", watched)
    (test,) = [test for test in matrices.tensor_core_tests(CPU) if test.format == name]
    assert outcome(test).passed
    assert len(made) >= 2
    assert all(each is not None for each in made)
    with monkeypatch.context() as broken:
        for layout in ("swizzled", "outer", "padded"):
            right = getattr(units_mm, layout)
            broken.setattr(units_mm, layout, lambda scales, right=right: right(scales.roll(1, 1)))
        assert not outcome(test).passed


class Copies(TorchFunctionMode):
    """Replaces operations that torch without CUDA cannot do on FakeTensors of a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        x = args[0] if args else None
        if function is torch.Tensor.copy_:
            return x
        if function is torch.Tensor.contiguous:
            return x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if function is torch.Tensor.__getitem__:
            part = torch.empty(x.shape, device="meta")[args[1]]
            return x.select(0, args[1]) if isinstance(args[1], int) else x.new_empty(part.shape)
        return function(*args, **(kwargs or {}))


class Context:
    """A stand-in for an autograd Function's ctx, since autograd's engine has no thread for a fake GPU."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_):
        pass

    def set_materialize_grads(self, _):
        pass


def saved_on_gpu(spec, rows, fan_in, fan_out):
    """The tensors saved for backward of a layer whose forward and backward run on FakeTensors of a GPU."""
    sizes = (rows, fan_in), (fan_out, fan_in), (rows, fan_out)
    with FakeTensorMode(), Copies(), torch.no_grad():
        x, w, dy = (torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes)
        x, w = x.requires_grad_(), w.requires_grad_()
        sizes = {name: quantizer.stateful.init("meta").shape for name, quantizer in spec.states.items()}
        states = {name: torch.empty(size, device="cuda") for name, size in sizes.items()}
        cores = tensor_cores_of(spec, x, w, torch.bfloat16)
        inputs = (x, w, None, spec, states, True, None, None, None, False, cores, torch.bfloat16, None)
        outputs = Rounded.forward(*inputs)
        context = Context()
        context.needs_input_grad = (True, True, False)
        Rounded.setup_context(context, inputs, outputs)
        y, grads = outputs[0], Rounded.backward(context, dy)
        assert (y.shape, grads[0].shape, grads[1].shape) == ((rows, fan_out), x.shape, w.shape)
        return context.saved_tensors


def matmuls_of(spec):
    return [spec.output, spec.grad_input, spec.grad_weight]


@for_each("capability", [(8, 9), (9, 0), (10, 0)], fast=[(9, 0), (10, 0)])
def test_every_native_recipe_passes_valid_arguments_to_scaled_mm(capability, monkeypatch):
    """Dtypes, shapes and strides, for all recipes whose matmuls this GPU's tensor cores compute."""
    calls, native = [], []
    stock = torch.nn.functional.scaled_mm

    def watched(*args, **kwargs):
        calls.append(seen(*args, **kwargs)[:2])
        return stock(*args, **kwargs)  # its own checks run too

    monkeypatch.setattr(scaled_mm, "capability", lambda device: capability)
    # FakeTensors give no seed.
    monkeypatch.setattr("halfstep.ops.casts.draw_seed", lambda generator, device: 1)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", watched)
    for name in list_recipes():
        specs = {rule.linear for stage in get_recipe(name).by_stage for rule in stage.rules if rule.linear.rounds}
        if not specs or not halfstep.is_native_available(name):
            continue
        native.append(name)
        for spec in specs:
            calls.clear()
            saved_on_gpu(spec, 256, 384, 128)
            assert len(calls) == sum(product.lhs is not None for product in matmuls_of(spec)), name
    least = {(8, 9): {"fp8-current", "fp8-delayed"}, (9, 0): {"fp8-block", "fp8-rowwise"}, (10, 0): {"mxfp8", "nvfp4"}}
    assert least[capability] <= set(native)


def test_codes_saved_for_backward_have_the_layout_of_its_matmuls(monkeypatch):
    """The transposed copy is made once, in the forward."""
    monkeypatch.setattr(scaled_mm, "capability", lambda device: (9, 0))
    for name in ("fp8-current", "fp8-rowwise", "fp8-block"):
        spec = next(rule.linear for rule in get_recipe(name).rules if rule.linear.rounds)
        saved = saved_on_gpu(spec, 256, 384, 128)
        kept = [t for t in saved if t is not None and t.dtype == torch.float8_e4m3fn]
        assert len(kept) == 2
        lies = {(384, 256), (128, 384)[::-1]} if name == "fp8-block" else {(256, 384), (128, 384)}
        assert {tuple(t.shape) for t in kept} == lies
        assert all(t.stride(0 if name != "fp8-block" else 1) == 1 for t in kept)


def nvfp4_layer(seed):
    """Forward and backward of a layer under nvfp4, which rotates one matmul of its input and of its gradient."""
    spec = next(rule.linear for rule in get_recipe("nvfp4").rules if rule.linear.rounds)
    torch.manual_seed(seed)
    x, w, dy = (draw(*size, seed=i).bfloat16() for i, size in enumerate([(256, 384), (128, 384), (256, 128)]))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = ops.linear(x.requires_grad_(), w.requires_grad_(), None, spec)
    y.backward(dy)
    return kept, (y.detach(), x.grad, w.grad, torch.get_rng_state())


def test_quantizing_for_two_matmuls_at_once_equals_doing_it_separately(fp8_gpu, monkeypatch):
    """Seeds are drawn in the same order, and the input is saved as codes of 4.5 bits per element."""
    fp8_gpu["capability"] = (10, 0)
    kept, found = nvfp4_layer(5)
    assert fp8_gpu["kinds"] == [("BlockWise1x16", "BlockWise1x16")] * 3
    assert not [t for t in kept if t.dtype == torch.bfloat16 and t.numel() > 128]

    def apart(first, second, *rest):
        return second.hadamard is None and goes_both_ways(first, second, *rest)

    monkeypatch.setattr(sides, "goes_both_ways", apart)
    for spec in specs_of("nvfp4"):
        spec.known.clear()
    kept, expected = nvfp4_layer(5)
    assert [t for t in kept if t.dtype == torch.bfloat16 and t.shape == (256, 384)]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    for spec in specs_of("nvfp4"):
        spec.known.clear()


COMPILED = {
    "fp8-current": (8, 9), "fp8-delayed": (8, 9), "fp8-delayed-megatron": (9, 0), "fp8-rowwise": (8, 9),
    "fp8-rowwise-gw-hp": (9, 0), "fp8lm-o1": (9, 0), "fp8-block": (9, 0), "mxfp8": (12, 0), "mxfp8-floor": (10, 0),
    "nvfp4": (10, 0), "unit-nvfp4": (10, 0),
}  # fmt: skip


def specs_of(name):
    return {rule.linear for stage in get_recipe(name).by_stage for rule in stage.rules if rule.linear.rounds}


def test_the_compile_test_covers_every_native_layer(fp8_gpu):
    native = set()
    for fp8_gpu["capability"] in ((8, 9), (9, 0), (10, 0), (12, 0)):
        native |= {s for name in list_recipes() if halfstep.is_native_available(name) for s in specs_of(name)}
    assert native == {s for name in COMPILED for s in specs_of(name)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it traces
@for_each("name", list(COMPILED))
def test_inductor_calls_one_native_operator_per_rounded_matmul(name, fp8_gpu):
    """Forward and backward compile without a graph break, contain no other matmul, and match the eager layer. torch's
    own operator would be lowered to others."""
    fp8_gpu["capability"] = COMPILED[name]
    (spec,) = specs_of(name)
    rounded = sum(product.lhs is not None for product in matmuls_of(spec))
    states = {name: quantizer.stateful.init("cpu") for name, quantizer in spec.states.items()}
    x, w, dy = (draw(*size, seed=i).bfloat16() for i, size in enumerate([(256, 384), (128, 384), (256, 128)]))
    x, w = x.requires_grad_(), w.requires_grad_()

    def layer(x, w):
        return ops.linear(x, w, None, spec, states)

    def passes(layer):
        torch.manual_seed(0)
        x.grad = w.grad = None
        fp8_gpu["kinds"].clear()
        y = layer(x, w)
        y.backward(dy)
        return y.detach(), x.grad, w.grad, tuple(fp8_gpu["kinds"])

    torch._dynamo.reset()
    *expected, products = passes(layer)
    (*found, compiled), code = run_and_get_code(passes, torch.compile(layer, fullgraph=True))
    assert sorted(compiled) == sorted(products)  # the matmuls of the two gradients may run in either order
    assert len(products) == rounded
    code = "\n".join(code)
    assert code.count("torch.ops.halfstep.units_mm.default(") == rounded
    assert len(re.findall(r"extern_kernels\.\w*mm|_scaled_mm", code)) == 3 - rounded
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other.double()).norm() < 0.01 * other.double().norm()


def hopper(a, b, fast=False):
    """A float32 matmul by an emulated H100's FP8 tensor cores."""
    one = torch.ones(())
    lhs, rhs = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    return mmaemu.scaled_mm(lhs, rhs, one, one, out_dtype=torch.float32, use_fast_accum=fast, splitk=1)


def test_probes_detect_how_a_matmul_accumulates():
    assert probes.fraction_bits(hopper) == 13
    assert probes.swamping(hopper, 1024).promoted == 128
    assert probes.swamping(lambda a, b: hopper(a, b, fast=True), 512) == (511, 511)
    assert probes.fraction_bits(torch.mm) >= 23
    assert probes.swamping(torch.mm) == (4095, 0)
    assert probes.swamping(torch.mm).promoted is None
    double = lambda a, b: (a.double() @ b.double()).float()  # noqa: E731
    assert set(probes.order(double).values()) == {0}
    assert probes.order(hopper, 256, (32,))[32] > 0


def accumulation_error_bound(lhs, rhs):
    """A bound of the accumulation error: per instruction, 33 times 2^-13 of the largest of its 32 terms and of the
    chunk's running sum."""
    total = torch.zeros(lhs.shape[0], rhs.shape[1], dtype=torch.float64)
    for chunk in range(0, lhs.shape[1], 128):
        running, loss = torch.zeros_like(total), torch.zeros_like(total)
        for start in range(chunk, min(chunk + 128, lhs.shape[1]), 32):
            a, b = lhs[:, start : start + 32], rhs[start : start + 32]
            largest = torch.maximum((a.abs()[:, :, None] * b.abs()).amax(1), running.abs() + loss)
            loss, running = loss + 33 * 2.0**-13 * largest, running + a @ b
        total += loss
    return total


def test_native_matmuls_stay_within_the_stated_error_bound(monkeypatch):
    """A layer's three matmuls with an H100's accumulation, emulated bit for bit: each instruction of 32 terms loses
    less than 33 * 2^-13 of the largest magnitude that it adds."""

    def product(a, b, scale_a, kind_a, scale_b, kind_b, *swizzles, bias=None, output_dtype=torch.bfloat16):
        assert kind_a == kind_b == KINDS.TensorWise
        assert set(swizzles) <= {None}
        return mmaemu.scaled_mm(a, b, scale_a.view(1), scale_b.view(1), out_dtype=output_dtype, splitk=1)

    whole = [Quantizer(formats.get(f), scales=Scales(TENSOR, get_scaling("current"))) for f in (E4, E4, E5)]
    given = draw(32, 256).abs(), draw(16, 256, seed=1), draw(32, 16, seed=2)
    results = []
    for capability in ((0, 0), (9, 0)):
        monkeypatch.setattr(scaled_mm, "capability", lambda device, found=capability: found)
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", product)
        x, w, dy = (t.to(torch.bfloat16) for t in given)
        x, w = x.requires_grad_(), w.requires_grad_()
        y = ops.linear(x, w, None, linear_spec(*whole))
        y.backward(dy)
        results.append([y.detach(), x.grad, w.grad])
    of_x, of_w, of_dy = (q.quantize(t.bfloat16()).dequantize(torch.float64) for q, t in zip(whole, given, strict=True))
    pairs = (of_x, of_w.t()), (of_dy, of_w), (of_dy.t(), of_x)
    for carried, native, (lhs, rhs) in zip(*results, pairs, strict=True):
        exact, terms = lhs @ rhs, lhs.abs() @ rhs.abs()
        half = exact.abs() * 2.0**-8
        assert ((carried.double() - exact).abs() <= half + 2 * lhs.shape[1] * 2.0**-24 * terms).all()
        assert ((native.double() - exact).abs() <= 2 * half + accumulation_error_bound(lhs, rhs)).all()
    assert not torch.equal(results[0][0], results[1][0])  # else the test shows nothing


def test_pays_for_large_matmuls_only():
    assert units_mm.pays(8192, 4096, 4096)
    assert not units_mm.pays(1024, 1024, 1024)
