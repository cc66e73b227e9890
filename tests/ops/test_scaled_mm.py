"""Native FP8 matmuls: torch's scaled_mm, which these tests run on a CPU, against the exact result."""

import copy
from dataclasses import replace

import pytest
import torch
from packaging.version import Version

import halfstep
from families import slow_unless
from halfstep import formats, get_quantizer, ops
from halfstep.kernels import scaled_mm
from halfstep.kernels.selftest import matrices
from halfstep.kernels.selftest.case import outcome
from halfstep.ops.casts import carrier
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import ROW, TENSOR
from halfstep.recipe import get_recipe, linear_spec
from tiny import assert_same


pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")
wants_scaled_mm = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"), reason="before torch 2.12 no CPU runs torch.nn.functional.scaled_mm"
)


def scaled(format, tile=TENSOR, scaling="current"):
    return Quantizer(formats.get(format), scales=Scales(tile, get_scaling(scaling)))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _runs_here():
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")


@pytest.fixture
def fp8_gpu(monkeypatch):
    """This CPU as a GPU of compute capability 9.0, and a list of the dtypes that scaled_mm was called with."""
    called = []
    if not hasattr(torch.nn.functional, "scaled_mm") or not _runs_here():
        pytest.skip("before torch 2.12 no CPU runs torch.nn.functional.scaled_mm")
    stock = torch.nn.functional.scaled_mm

    def watched(lhs, rhs, *args, **kwargs):
        called.append((lhs.dtype, rhs.dtype))
        assert rhs.stride(0) == 1  # GPUs need row-major left and column-major right operands
        assert lhs.stride(1) == 1
        return stock(lhs, rhs, *args, **kwargs)

    monkeypatch.setattr(scaled_mm, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", watched)
    return called


@wants_scaled_mm
def test_a_traced_graph_treats_device_queries_as_constants():
    """Dynamo warns of functions wrapped by `functools.cache` and traces the wrapped ones."""

    def sizes(x):
        versions = scaled_mm._toolkit() + scaled_mm._torch()
        return x + sum(versions) + len(scaled_mm.refusal(quantizer, x.device)) + carrier("posit 8 1", x.dtype).itemsize

    quantizer, x = scaled(E4), torch.zeros(2)
    assert_same(torch.compile(sizes, backend="eager", fullgraph=True)(x), sizes(x))


E4, E5 = "float8_e4m3fn", "float8_e5m2"
FLOAT8 = {E4: torch.float8_e4m3fn, E5: torch.float8_e5m2}
QUANTIZERS = {
    "current": (scaled(E4), scaled(E4), scaled(E5)),
    "power of two": (scaled(E4, scaling="rceil"), scaled(E4, scaling="rceil"), scaled(E5, scaling="rceil")),
    "rows": (scaled(E4, ROW), scaled(E4, ROW), scaled(E5, ROW)),
    "rows and a tensor": (scaled(E4, ROW, "rceil"), scaled(E4), scaled(E5, ROW)),
}
every_one = pytest.mark.parametrize("quantizers", QUANTIZERS.values(), ids=list(QUANTIZERS))


@every_one
def test_native_matmuls_match_exact_ones_within_accumulation_error(quantizers, fp8_gpu):
    given = draw(48, 64), draw(32, 64, seed=1), draw(48, 32, seed=2)
    x, w, dy = (t.to(torch.bfloat16) for t in given)
    x, w = x.requires_grad_(), w.requires_grad_()
    ops.linear(x, w, None, linear_spec(*quantizers)).backward(dy)
    assert len(fp8_gpu) == 3

    def rounded(t, quantizer):
        return quantizer.quantize(t.detach().contiguous()).dequantize(torch.float64)

    of_x, of_w, of_dy = quantizers
    for found, lhs, rhs in (
        (ops.linear(x, w, None, linear_spec(*quantizers)).detach(), rounded(x, of_x), rounded(w, of_w).t()),
        (x.grad, rounded(dy, of_dy), rounded(w.t(), of_w).t()),
        (w.grad, rounded(dy.t(), of_dy), rounded(x.t(), of_x).t()),
    ):
        exact, bound = lhs @ rhs, lhs.shape[1] * 2.0**-24 * (lhs.abs() @ rhs.abs())
        # The reference rounds a float32 row scale times an element once; native matmuls do not.
        assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 + 4 * bound).all()
        assert (found == exact.to(torch.bfloat16)).double().mean() > 0.98


def backward_from(model, x, y, scaler):
    loss = torch.nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    return loss.item()


@pytest.mark.parametrize(
    "name",  # one step's matmuls of the others are tested above
    slow_unless({"fp8-delayed"}.__contains__, ["fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-rowwise-gw-hp"]),
)
def test_native_training_matches_emulated_up_to_the_order_of_sums(name, fp8_gpu, monkeypatch):
    """Step by step from the same state, since differences of two orders of summation grow with the steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe=name)
    x, y = draw(64, 32), draw(64, 16, seed=1)
    course = []
    for _ in range(20):
        twin = copy.deepcopy(model)
        monkeypatch.setattr(scaled_mm, "capability", lambda device: (0, 0))
        expected = backward_from(twin, x, y, scaler)
        monkeypatch.setattr(scaled_mm, "capability", lambda device: (9, 0))
        course.append(backward_from(model, x, y, scaler))
        assert course[-1] == pytest.approx(expected, rel=1e-3)  # on an EPYC 3e-5 apart, gradients 4e-3
        for found, wanted in zip(model.parameters(), twin.parameters(), strict=True):
            assert (found.grad - wanted.grad).norm() < 0.02 * wanted.grad.norm()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert len(fp8_gpu) >= 40
    assert course[-1] < 0.5 * course[0]


@pytest.mark.parametrize("name", ["fp8-current", "fp8-rowwise"])
def test_weights_quantized_for_inference_are_passed_to_scaled_mm(name, fp8_gpu):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    halfstep.apply(model, name)
    x = draw(16, 32)
    with torch.no_grad():
        expected = model.eval()(x)
        halfstep.quantize_model(model, name)
        fp8_gpu.clear()
        assert torch.equal(model(x), expected)
    assert fp8_gpu == [(torch.float8_e4m3fn, torch.float8_e4m3fn)] * 2


def test_operands_are_saved_for_backward_in_8_bits(fp8_gpu):
    kept = []
    x, w = draw(32, 64).requires_grad_(), draw(16, 64, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):
        ops.linear(x, w, None, linear_spec(scaled(E4), scaled(E4), scaled(E5)))
    assert kept.count(torch.float8_e4m3fn) == 2


@every_one
def test_shapes_that_are_no_multiples_of_16_are_emulated(quantizers, fp8_gpu):
    """Dimensions must be multiples of 16: others go where they go on a machine without units."""
    x, w = draw(5, 24).to(torch.bfloat16), draw(7, 24, seed=1).to(torch.bfloat16)
    found = ops.linear(x, w, None, linear_spec(*quantizers))
    assert not fp8_gpu
    lhs, rhs = (q.quantize(t).dequantize(torch.float64) for t, q in zip((x, w), quantizers, strict=False))
    exact = lhs @ rhs.t()
    bound = 24 * 2.0**-23 * (lhs.abs() @ rhs.abs().t())
    assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 + bound).all()


def test_two_e5m2_operands_are_emulated(fp8_gpu):
    x, w = draw(16, 32).to(torch.bfloat16), draw(16, 32, seed=1).to(torch.bfloat16)
    ops.linear(x, w, None, linear_spec(scaled(E5), scaled(E5), scaled(E5)))
    assert not fp8_gpu


@wants_scaled_mm
@pytest.mark.parametrize(("capability", "quantizer", "reason"), [
    ((0, 0), scaled(E4), "no FP8 tensor cores"),
    ((8, 0), scaled(E4), "compute capability 8.0: FP8 tensor cores came with 8.9"),
    ((8, 9), scaled(E4), None),
    ((8, 0), scaled(E4, ROW), "compute capability 8.0: FP8 tensor cores came with 8.9"),
    ((9, 0), scaled(E4, ROW), None),
    ((9, 0), scaled("e4m3fnuz"), "FP8 tensor cores take float8_e4m3fn and float8_e5m2"),
    ((9, 0), get_quantizer("mxfp8_e4m3"), "tiles of 1x32 need compute capability 10.x or 12.x alone; 9.0 found"),
    ((10, 0), get_quantizer("mxfp8_e4m3"), None),
    ((12, 0), get_quantizer("nvfp4"), "10.x alone; 12.0 found"),
    ((9, 0), get_quantizer("nvfp4"), "tiles of 1x16 need compute capability 10.x alone; 9.0 found"),
    ((10, 3), get_quantizer("nvfp4"), None),
    ((10, 0), get_quantizer("mxfp4"), "FP4 tensor cores take tiles of 1x16 with two levels of scales"),
    ((9, 0), get_quantizer("fp8_1x128"), None),
    ((9, 0), get_quantizer("fp8_128x128"), None),
    ((8, 9), get_quantizer("fp8_1x128"), "tiles of 1x128 need compute capability 9.x alone; 8.9 found"),
    ((10, 0), get_quantizer("fp8_128x128"), "tiles of 128x128 need compute capability 9.x alone; 10.0 found"),
    ((9, 0), scaled(E4, scaling="absmax"), "tiles of whole tensor (absmax)"),
    ((9, 0), replace(scaled(E4), outliers=6.0), "outliers kept apart"),
    ((9, 0), Quantizer(formats.get(E4)), "one scale a tensor or a row"),
])  # fmt: skip
def test_refusal_names_the_reason_for_no_native_path(capability, quantizer, reason, monkeypatch):
    monkeypatch.setattr(scaled_mm, "capability", lambda device: capability)
    found = scaled_mm.refusal(quantizer, CPU)
    assert found is None if reason is None else reason in found


@wants_scaled_mm
def test_refusal_names_the_torch_or_cuda_version_that_is_needed(monkeypatch):
    rows, tiles, blocks = scaled(E4, ROW), get_quantizer("mxfp8_e4m3"), get_quantizer("fp8_1x128")
    for capability, quantizer, old, new, reason in (
        ((8, 9), rows, {"_torch": (2, 11)}, {"_torch": (2, 12)}, "a scale a row needs torch 2.12 or newer on compute"),
        ((12, 0), rows, {"_torch": (2, 10)}, {"_torch": (2, 13)}, "capability 12.0; 2.10 found"),
        ((9, 0), rows, {}, {"_torch": (2, 10)}, None),
        ((12, 1), tiles, {"_toolkit": (12, 9)}, {"_toolkit": (13, 0)}, "need a torch built with CUDA 13.0 or newer on"),
        ((10, 0), tiles, {}, {"_toolkit": (12, 8)}, None),
        ((9, 0), blocks, {"_toolkit": (12, 8)}, {"_toolkit": (12, 9)}, "on compute capability 9.0; 12.8 found"),
    ):
        monkeypatch.setattr(scaled_mm, "capability", lambda device, found=capability: found)
        for versions, expected in ((old, reason), (new, None)):
            for name, version in versions.items():
                monkeypatch.setattr(scaled_mm, name, lambda found=version: found)
            found = scaled_mm.refusal(quantizer, CPU)
            assert found is None if expected is None or not versions else expected in found, (capability, found)


@wants_scaled_mm
def test_row_scales_need_e4m3_on_the_right_except_on_9x(monkeypatch):
    """On other GPUs torch calls CUTLASS, which accepts E5M2 on the left only."""
    left, right = scaled(E5, ROW), scaled(E4, ROW)
    operands = [matrices.Operand(draw(16, 16).to(dtype), torch.ones(16, 1)) for dtype in (FLOAT8[E4], FLOAT8[E5])]
    monkeypatch.setattr(scaled_mm, "units_mm", lambda lhs, *rest: lhs.codes)
    for capability, takes in (((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)):
        monkeypatch.setattr(scaled_mm, "capability", lambda device, found=capability: found)
        assert scaled_mm.product_refusal(left, right, CPU) is None
        refusal = scaled_mm.product_refusal(right, left, CPU)
        assert refusal is None if takes else "E5M2 on the right with a scale a row" in refusal
        assert (scaled_mm.run(*operands, None, torch.bfloat16) is not None) is takes
        assert scaled_mm.run(*operands[::-1], None, torch.bfloat16) is not None


@wants_scaled_mm
def test_is_native_available_gives_the_reason(monkeypatch):
    found = halfstep.is_native_available("fp8-current", "cpu", return_reason=True)
    assert found == (False, "no FP8 tensor cores on cpu here")
    monkeypatch.setattr(scaled_mm, "capability", lambda device: (9, 0))
    assert halfstep.is_native_available("fp8-current")
    assert halfstep.is_native_available("fp8-current", return_reason=True) == (True, "")
    available, reason = halfstep.is_native_available("mxfp8", return_reason=True)
    assert not available
    assert "tiles of 1x32" in reason
    assert not halfstep.is_native_available(get_recipe("fp32"))


def test_doctor_tests_native_matmuls_if_available(fp8_gpu, monkeypatch):
    def of_e4m3():
        return [outcome(test) for test in matrices.tensor_core_tests(CPU) if test.format.startswith(E4)]

    found = of_e4m3()
    assert len(found) == 2
    assert all(one.passed and one.compared for one in found)
    sizes = len(fp8_gpu) / 2
    with (
        monkeypatch.context() as older
    ):  # a GPU of 8.9 under a torch that launches row-scaled matmuls on a wrong stream
        older.setattr(scaled_mm, "capability", lambda device: (8, 9))
        older.setattr(scaled_mm, "_torch", lambda: (2, 11))
        (whole,) = of_e4m3()
        assert whole.passed
    assert len(fp8_gpu) == 3 * sizes
    stock = scaled_mm.run
    monkeypatch.setattr(scaled_mm, "run", lambda *arguments: 2 * stock(*arguments))
    assert not any(one.passed for one in of_e4m3())
