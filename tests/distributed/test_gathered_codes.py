"""`GatherCodes`: tokens sharded over ranks (sequence parallel) are gathered as codes."""

import pytest
import torch
from test_tensor_parallel import NAMES, WIDE, gathered, layer
from torch import distributed as dist

import halfstep
from ranks import on_ranks
from tiny import assert_same


pytestmark = pytest.mark.slow
BATCH, TOKENS = 2, 256  # 128 tokens of each example on a rank: whole tiles of fp8-block


def samples(seed):
    x = torch.randn(BATCH, TOKENS, WIDE, generator=torch.Generator().manual_seed(seed))
    return (x * torch.exp(torch.randn(WIDE, generator=torch.Generator().manual_seed(3)))).bfloat16().float()


def gradient(p):
    return p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad


def trained(model, own=lambda x: x, steps=2):
    """y and the gradients of a model's last step, and its scaling states."""
    for _ in range(steps):
        x = own(samples(1)).clone().requires_grad_()
        y = model(x)
        y.backward(own(samples(2)))
        grads = {"x": x.grad, **{n: gradient(p) for n, p in model.named_parameters()}}
        model.zero_grad()
        halfstep.advance(model)
    return y.detach(), grads, halfstep.nn.scaling.Scalings(model).state_dict()


def train_parallel(name, style):
    """The results of `trained` for a column-parallel layer; the bytes a rank sends in a pass for each element of its
    input, and the elements it saves."""
    from torch.distributed.tensor.parallel import parallelize_module

    model, sent, kept, original = layer(), [], {}, dist.all_gather_into_tensor
    halfstep.apply(model, name)
    parallelize_module(model, dist.init_device_mesh("cpu", (2,)), style)

    def counted(out, given, group=None, **options):
        sent.append(given.nbytes)
        return original(out, given, group, **options)

    def own(each):
        dim = 1 if torch.equal(each, samples(1)) else 2  # an input's tokens, a gradient's columns
        return each.chunk(2, dim)[dist.get_rank()]

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel() if tensor.dim() == 3 else 0
        return tensor

    dist.all_gather_into_tensor = counted
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y, grads, states = trained(model, own, steps=2)
    dist.all_gather_into_tensor = original
    grads["x"] = torch.cat(gathered(grads["x"]), 1)
    return torch.cat(gathered(y), 2), grads, states, sum(sent) / 2 / (samples(1).numel() / 2), max(kept.values())


def errors_and_plain_output(rank):
    """Errors for a tile split over two ranks and for uneven tokens; y of a layer that is not rounded."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    mesh, found = dist.init_device_mesh("cpu", (2,)), {}

    def called(name, x):
        model = layer()
        halfstep.apply(model, name)
        parallelize_module(model, mesh, halfstep.distributed.GatherCodes(Shard(1)))
        return model(x)

    def said(name, x):
        try:
            called(name, x).sum().backward()
        except halfstep.HalfstepError as error:
            return str(error)
        return ""

    found["tile"] = said("fp8-block", samples(1)[:, :64])
    whole = DTensor.from_local(samples(1)[:, :5], mesh, [Replicate()], run_check=False)
    found["uneven"] = said("fp8-current", whole.redistribute(placements=[Shard(1)]))
    found["fits"] = said("fp8-block", samples(1)[:, :128])
    found["plain"] = called("fp32", samples(1).chunk(2, 1)[rank]).detach()
    return found


def everything(rank):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel

    styles = {"codes": halfstep.distributed.GatherCodes(Shard(1)), "torch's": ColwiseParallel(input_layouts=Shard(1))}
    return errors_and_plain_output(rank) | {
        (name, key): train_parallel(name, style) for name in NAMES for key, style in styles.items()
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(everything, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES)
def test_results_equal_one_process_and_torchs_style(ranks, name):
    """But for the gradient of the input, which ranks add up: it equals that of torch's style."""
    model = layer()
    halfstep.apply(model, name)
    y, grads, states = trained(model)
    for rank in ranks:
        found, others = rank[name, "codes"], rank[name, "torch's"]
        assert_same([found[0], found[2]], [y, states])
        assert_same(found[:3], others[:3])
        assert_same({n: found[1][n] for n in ("weight", "bias")}, {n: grads[n] for n in ("weight", "bias")})


@pytest.mark.parametrize("name", NAMES)
def test_elements_are_sent_as_codes_and_saved_by_one_rank(ranks, name):
    """Scales are sent beside the codes: at most one byte for 16 elements."""
    for rank in ranks:
        sent, kept = rank[name, "codes"][3:]
        assert 2 <= sent < 2 + 2 / 16
        assert (kept, rank[name, "torch's"][4]) == (samples(1).numel() / 2, samples(1).numel())


def test_split_tiles_and_uneven_tokens_raise(ranks):
    expected = layer()(samples(1)).detach()
    for number, rank in enumerate(ranks):
        assert (
            "2 pieces of 64 x 256, and tiles that share a scale are 128x1: a tile would be split over two"
            in rank["tile"]
        )
        assert "which must have equal shards" in rank["uneven"]
        assert rank["fits"] == ""
        torch.testing.assert_close(rank["plain"], expected.chunk(2, 2)[number])
