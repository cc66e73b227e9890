"""CodeTensor, a tensor stored as codes: reads give the values, writes are rounded, anything else is refused."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from families import for_each
from halfstep import formats, ops
from halfstep.errors import QuantizationError
from halfstep.ops.code_tensor import CodeTensor, parameter
from halfstep.quant import Quantizer, Scales, get_quantizer
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from tiny import assert_same


ONE_SCALE = {
    name: Quantizer(formats.get(name), scales=Scales(TENSOR, get_scaling("rceil")))
    for name in ("fp16", "bf16", "e4m3fn")
}
TILES = {name: get_quantizer(name) for name in ("mxfp8", "mxfp4", "nvfp4", "fp8_128x128")}
every = for_each("quantizer", [*ONE_SCALE.values(), *TILES.values()])
one_scale = for_each("quantizer", ONE_SCALE.values())
tiled = for_each("quantizer", TILES.values())
backends = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])


def code_tensor(quantizer, shape=(6, 32), dtype=torch.float32):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return CodeTensor.encode(x, quantizer)


def weight(quantizer=ONE_SCALE["e4m3fn"], grads=ONE_SCALE["e4m3fn"]):
    return parameter(code_tensor(quantizer), grads=grads)


def rounded(x, quantizer):
    return quantizer.quantize(x).dequantize()


@every
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_code_tensor_has_its_values_dtype_and_stores_codes(quantizer, dtype):
    tensor = code_tensor(quantizer, dtype=dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((6, 32), dtype, True)
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_same(tensor.values(), rounded(x, quantizer))
    assert sum(part.nbytes for part in tensor.parts.values()) < x.float().nbytes * 0.6


READS = {
    "sum": torch.sum,
    "to": lambda x: x.to(torch.float64),
    "clone": torch.clone,
    "add": lambda x: x + x.t().t(),
    "linear": lambda x: F.linear(torch.ones(3, 32).to(x.dtype), x),
    "embedding": lambda x: F.embedding(torch.tensor([2, 0]), x),
    "index": lambda x: x[1:4, ::2] * 1,
    "row": lambda x: x[-1].tolist(),
    "chunks": lambda x: torch.cat(x.chunk(3)[::-1]),
    "numpy": lambda x: torch.from_numpy(x.numpy().copy()),
    "flat": lambda x: nn.utils.parameters_to_vector([x]),
    "norm": lambda x: torch.linalg.vector_norm(x, 3),
    "foreach": lambda x: torch._foreach_norm([x, x])[1],
    "round_to": lambda x: ops.round_to(x, "mxfp4"),
    "quantize": lambda x: ops.quantize(x, "mxfp8").dequantize(),
    "vmap": lambda x: torch.vmap(torch.sum)(x),
    "save": lambda x: torch.load(saved(x)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@every
def test_views_in_inference_mode_equal_those_of_a_plain_tensor(quantizer):
    tensor = code_tensor(quantizer)
    stock = tensor.values()
    with torch.inference_mode():
        for view in (torch.Tensor.detach, torch.Tensor.t, torch.flatten, lambda x: x[1:4], lambda x: x.unbind()[0]):
            assert view(tensor).is_inference() == view(stock).is_inference()
            assert_same(view(tensor).clone(), view(stock).clone())
    assert_same((tensor.detach() * 2).clone(), stock * 2)


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return file


@every
@for_each("read", READS)
def test_reads_return_plain_tensors_of_the_values(quantizer, read):
    read = READS[read]
    tensor = code_tensor(quantizer)
    found = read(tensor)
    assert_same(found, read(tensor.values()))
    assert not isinstance(found, CodeTensor)


WRITES = {
    "mul_": lambda x: x.mul_(3.0),
    "+=": lambda x: x.__iadd__(torch.ones(32)),
    "clamp_": lambda x: x.clamp_(-0.1, 0.1),
    "copy_": lambda x: x.copy_(torch.arange(192.0).view(6, 32)),
    "data": lambda x: setattr(x, "data", torch.arange(192.0).view(6, 32)),
    "data_": lambda x: x.data.mul_(torch.arange(32.0)),
    "detached": lambda x: x.detach().zero_(),
    "out": lambda x: torch.mm(torch.ones(6, 2), torch.ones(2, 32), out=x),
    "out by name": lambda x: torch.add(x, 100.0, out=x),
    "init": lambda x: nn.init.kaiming_uniform_(x, generator=torch.Generator().manual_seed(1)),
    "foreach": lambda x: torch._foreach_add_([x, torch.zeros(2)], [torch.ones(6, 32), torch.ones(2)]),
    "index_put_": lambda x: x.index_put_((torch.tensor([0, 2]),), torch.tensor(9.0)),
    "mask": lambda x: x.__setitem__(x.values() > 0 if isinstance(x, CodeTensor) else x > 0, 0.5),
    "vector": lambda x: nn.utils.vector_to_parameters(torch.arange(192.0), [x]),
}
VIEWS = {
    "row": lambda x: x.__setitem__(1, 50.0),
    "slice": lambda x: x[2:5, ::3].mul_(-7.0),
    "turned": lambda x: x.t()[3].add_(1.0),
    "flat": lambda x: x.view(-1)[30:40].fill_(8.0),
    "chunk": lambda x: x.chunk(2)[1].zero_(),
    "views of views": lambda x: x.view(3, 2, 32)[1].unbind()[0].clamp_(-0.1, 0.1),
    "diagonal": lambda x: x.diagonal().zero_(),
    "copied": lambda x: x[0].copy_(x[1]),
}


@every
@for_each("write", WRITES)
def test_writes_are_rounded(quantizer, write):
    write = WRITES[write]
    tensor = code_tensor(quantizer)
    expected, version = tensor.values(), tensor._version
    codes = tensor.codes
    write(expected), write(tensor)
    assert_same(tensor.values(), rounded(expected, quantizer))
    assert tensor.codes is codes
    assert tensor._version > version


@one_scale
@for_each("write", WRITES | VIEWS)
def test_a_write_through_a_view_rescales_the_whole_tensor(quantizer, write):
    write = (WRITES | VIEWS)[write]
    tensor = parameter(code_tensor(quantizer), grads=None)
    views = tensor.detach()[1], tensor.detach().t(), tensor.detach().view(-1)
    expected, version = tensor.values(), tensor._version
    with torch.no_grad():
        write(expected), write(tensor)
    assert_same(tensor.values(), rounded(expected, quantizer))
    assert tensor._version > version
    for view, same in zip(views, (tensor.values()[1], tensor.values().t(), tensor.values().view(-1)), strict=True):
        assert_same(view.values(), same)


@tiled
@for_each("write", VIEWS)
def test_a_write_through_a_view_of_a_tiled_tensor_is_refused(quantizer, write):
    write = VIEWS[write]
    tensor = code_tensor(quantizer)
    before = tensor.values()
    with pytest.raises(QuantizationError, match=r"through a view .* in tiles .*copy that back"):
        write(tensor)
    assert_same(tensor.values(), before)


@every
@for_each(
    "function, message",
    [
        (lambda x: x.view(torch.int32), r"cannot be viewed in another dtype.* Call it on tensor.detach\(\).clone\(\)"),
        (lambda x: x.set_(torch.zeros(6, 32)), "nor its shape be changed"),
        (lambda x: x.resize_(3, 3), "nor its shape be changed"),
        (lambda x: x.t_(), "nor its shape be changed"),
        (
            lambda x: torch.mm(torch.ones(6, 2), torch.ones(2, 4), out=x),
            r"from \(6, 32\) to \(6, 4\)",
        ),
        (lambda x: setattr(x, "data", torch.zeros(12, 32)[:6]), "a view of a larger tensor.*Call copy_"),
        (lambda x: setattr(x[1], "data", torch.zeros(32)), "of a view of a tensor stored as codes"),
        (lambda x: setattr(x, "data", torch.zeros(6, 32).half()), "halfstep.revert the model first"),
        (lambda x: setattr(x, "data", torch.zeros(6, 1)), "halfstep.revert the model first"),
        (lambda x: x.data_ptr(), "no address holds its values"),
        (torch.from_dlpack, "no address holds its values"),
    ],
)
def test_unsupported_operations_are_refused_without_changes(quantizer, function, message):
    tensor = code_tensor(quantizer)
    before = tensor.values()
    with pytest.raises(QuantizationError, match=message):
        function(tensor)
    assert_same(tensor.values(), before)


def test_numpy_arrays_of_a_code_tensor_are_read_only():
    array = code_tensor(ONE_SCALE["fp16"]).numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1.0
    with pytest.raises(RuntimeError, match="requires grad"):
        weight().numpy()


def test_writes_to_expanded_elements_are_refused():
    with pytest.raises(RuntimeError, match="more than one element"):
        code_tensor(ONE_SCALE["fp16"])[:1].expand(4, 32).add_(1.0)


def test_gradients_are_rounded_once_per_backward_and_clipped_by_their_scale():
    w = weight()
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        before = None if w.grad is None else w.grad.values()
        (F.linear(x, w) ** 2).sum().backward()
        (exact,) = torch.autograd.grad((F.linear(x, w) ** 2).sum(), w)
        assert isinstance(w.grad, CodeTensor)
        assert_same(w.grad.values(), rounded(exact if before is None else before + exact, w.grads))
    values = w.grad.values()
    norm = nn.utils.clip_grad_norm_([w], 1.0)
    torch.testing.assert_close(norm, values.norm())
    assert_same(w.grad.values(), values * torch.clamp(1.0 / (norm + 1e-6), max=1.0))
    codes = w.grad.codes.clone()
    w.grad.div_(4.0)
    assert_same(w.grad.codes.view(torch.uint8), codes.view(torch.uint8))
    expected = w.grad.values()
    w.grad[0].mul_(0.5), expected[0].mul_(0.5)  # a row has no scale of its own
    assert_same(w.grad.values(), rounded(expected, w.grads))
    w.grad.zero_()
    assert not w.grad.values().any()


def test_second_derivatives_and_l2_penalties_equal_those_of_the_values():
    w = weight(grads=None)
    stock = nn.Parameter(w.values())
    for p in (w, stock):
        (grad,) = torch.autograd.grad((p**3).sum(), p, create_graph=True)
        (grad.sum() + (p**2).sum()).backward()
    assert_same(w.grad, stock.grad)


def test_backward_after_a_write_to_the_weight_is_refused():
    w = weight()
    loss = (w**2).sum()
    with torch.no_grad():
        w[0] = 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        w[0] = 1.0


@for_each(
    "kind, options",
    [(torch.optim.AdamW, {"weight_decay": 0.0}), (torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9})],
)  # AdamW's weight decay is a separate write, which rounds
@for_each("how", [{}, {"foreach": True}, {"fused": True}])
@one_scale
def test_torchs_optimizers_step_on_values_and_round_them(quantizer, kind, options, how):
    ours = weight(quantizer, None)
    stock = nn.Parameter(ours.values())
    optimizers = [kind([p], lr=0.1, **options, **how) for p in (ours, stock)]
    for seed in range(3):
        grad = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))
        for p, optimizer in zip((ours, stock), optimizers, strict=True):
            p.grad = grad.clone()
            optimizer.step()
        stock.data.copy_(rounded(stock.data, quantizer))
        assert_same(ours.values(), stock.detach())


@one_scale
def test_copied_and_pickled_parameters_keep_their_codes(quantizer):
    w = weight(quantizer).requires_grad_(False)
    for twin in (copy.deepcopy(w), pickle.loads(pickle.dumps(w)), torch.load(saved(w), weights_only=False)):
        assert isinstance(twin, CodeTensor)
        assert isinstance(twin, nn.Parameter)
        assert not twin.requires_grad
        assert_same(twin.values(), w.values())
        twin.requires_grad_()
        (twin**2).sum().backward()
        assert isinstance(twin.grad, CodeTensor)
        with torch.no_grad():
            twin.zero_()
        assert w.values().any()
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(saved(w))


def test_share_memory_shares_the_codes():
    w = weight()
    assert not w.is_shared()
    assert w.share_memory_() is w
    assert w.is_shared()
    assert w.codes.is_shared()


@backends
@every
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*bf16 and fp16 are mixed")
def test_compiled_functions_read_the_values(quantizer, backend):
    torch._dynamo.reset()
    w = parameter(code_tensor(quantizer))
    stock = nn.Parameter(w.values())
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(3))

    def loss(x, w):
        return F.linear(x, w).square().sum()

    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(loss, backend=backend, fullgraph=True)(x, w).backward()
        loss(x, stock).backward()
    torch.testing.assert_close(w.grad, stock.grad, rtol=1e-2 if backend == "inductor" else 0, atol=0)


@pytest.mark.slow
@backends
@one_scale
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*bf16 and fp16 are mixed")
def test_compiled_functions_round_their_writes(quantizer, backend):
    torch._dynamo.reset()

    def halve(w):
        with torch.no_grad():
            w.mul_(0.3)
            w[0].add_(1.0)
        return w.sum()

    ours, twin = weight(quantizer), weight(quantizer)
    found = torch.compile(halve, backend=backend, fullgraph=True)(ours)
    near = (
        {"rtol": 2.0**-3, "atol": 0.01} if backend == "inductor" else {"rtol": 0, "atol": 0}
    )  # Inductor rounds only at the end
    torch.testing.assert_close(found, halve(twin), **near)
    torch.testing.assert_close(ours.values(), twin.values(), **near)
    assert_same(rounded(ours.values(), quantizer), ours.values())


def test_collectives_are_refused(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        for send in (torch.distributed.all_reduce, lambda x: torch.distributed.broadcast(x, 0)):
            with pytest.raises(QuantizationError, match=r"collectives do not send: send tensor.detach\(\).clone\(\)"):
                send(code_tensor(ONE_SCALE["fp16"]))
    finally:
        torch.distributed.destroy_process_group()


def test_values_of_is_differentiable():
    w, stock = weight(grads=None), weight(grads=None)
    (ops.values_of(w) ** 3).sum().backward()
    (stock**3).sum().backward()
    assert_same(w.grad, stock.grad)
    plain = torch.ones(3)
    assert ops.values_of(plain) is plain
