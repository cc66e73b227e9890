"""torch.compile of models on a fake GPU: one graph, whose operators are opaque and pass opcheck."""

import pytest
import torch

from fake_cuda import fake_cuda
from halfstep import formats, get_quantizer
from halfstep.quant.estimator import Clamp, Estimator
from tiny import EVERY, model_for, prepared


OWN = {"fp8-current", "fp8-block"}  # one for each path of the operators; models that round nothing have none
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_a_model_compiles_to_one_graph(name):
    graphs = []

    def kept(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    with fake_cuda():
        with torch.device("cuda"):
            model = model_for(name)
        model, _, _ = prepared(name, model)
        out = torch.compile(model, fullgraph=True, backend=kept)(torch.empty(12, 8, device="cuda"))
    assert (out.shape, out.device.type, out.dtype) == ((12, 4), "cuda", torch.float32)
    (graph,) = graphs
    called = "".join(str(module.graph) for module in graph.modules() if hasattr(module, "graph"))
    assert "halfstep.round" in called or name not in OWN


X = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
E4M3, MX = formats.get("float8_e4m3fn"), get_quantizer("mxfp8")
MADE = MX.quantize(X).tensors
TILES = (1, 32, MX.scales.rule.text)
X8, ONE = X[:, :16].repeat(4, 1).to(torch.float8_e4m3fn), torch.ones(())
CALLS = {
    "round": (X, torch.empty_like(X), E4M3.key, "nearest_even", "saturate", None),
    "round_scaled": (
        X, torch.tensor(0.5), torch.empty_like(X), E4M3.key, "stochastic", torch.tensor(5), torch.ones(()),
    ),
    "seeds": (X, torch.tensor([5, 0]), 3),
    "amax": (X, torch.tensor(0.0), torch.empty(())),
    "round_tiles": (X, torch.empty_like(X), MX.format.key, *TILES, None, "nearest_even", None, None),
    "quantize": (
        X, [torch.empty_like(part) for part in MADE.values()], list(MADE), MX.format.key, *TILES, "nearest_even", None,
    ),
    "rounded_scaled": (X, torch.tensor(0.5), torch.bfloat16, E4M3.key, "stochastic", torch.tensor(5)),
    "quantized": (X, MX.format.key, *TILES, "nearest_even", None),
    "dequantize": (
        list(MADE.values()), list(MADE), torch.empty_like(X), MX.format.key, *TILES, None, "nearest_even",
    ),
    "units_mm": (X8, X8, ONE, ONE, None, None, "TensorWise", "TensorWise", None, torch.bfloat16),
    "rotate": (X, torch.ones(8), 1),
    "native_mm": (X.bfloat16(), X.bfloat16().t(), None, torch.tensor(0.5)),
    "few_rows": (X, X, torch.tensor(0.5), None, None, torch.empty(4, 4)),
    "whole_mm": (X.char(), X.char().t(), torch.ones(4, 1), torch.ones(1, 4), None, None, torch.empty(4, 4)),
    "quantiles": (X, torch.empty(2, 1), Clamp().text),
    "round_rows": (X, None, torch.ones(4, 1), torch.empty_like(X), E4M3.key, "nearest_even", None, None),
    "sparse_product": (X.relu(), X.t().contiguous(), None, torch.empty(4, 4), False),
    "estimate": (X.clone(), X, torch.tensor(1.0), E4M3.key, 0, 0, None, Estimator().text),
    "accumulate": (X, X.t().contiguous(), torch.empty(4, 4), formats.get("fp16").key, 8, False, None),
}  # fmt: skip
DRAWN = {"draw_signs"}  # opcheck runs an operator twice, and expects equal results
WATCHED = {"follow"}  # only for FakeTensors, so that operators can be counted: in no graph


def test_every_operator_is_covered():
    names = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("halfstep::")}
    assert names == CALLS.keys() | DRAWN | WATCHED


@pytest.mark.quick(*sorted(CALLS.keys() - {"rotate"}))  # seconds
@pytest.mark.parametrize("name", CALLS)
def test_operators_pass_opcheck(name):
    product = "aten::_scaled_mm_v2"
    if name == "units_mm" and not (
        product in torch._C._dispatch_get_all_op_names()
        and torch._C._dispatch_has_kernel_for_dispatch_key(product, "CPU")
    ):
        pytest.skip("before torch 2.12 no CPU runs torch.nn.functional.scaled_mm")
    compares = name != "units_mm"  # compares inputs before and after, which torch cannot do for float8 on a CPU
    asked = ["test_schema"] * compares + ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(getattr(torch.ops.halfstep, name).default, CALLS[name], test_utils=asked)


@pytest.mark.parametrize("name", [*CALLS, *DRAWN, *WATCHED])
def test_operators_have_kernels_for_cpu_and_cuda(name):
    """One kernel for all devices, which dispatches to Triton's."""
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"halfstep::{name}", key)
