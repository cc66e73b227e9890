"""has_memory within a traced graph, and between two graphs."""

import pytest
import torch

from halfstep.quant.tracing import has_memory


@pytest.fixture(autouse=True)
def _reset_dynamo():
    torch._dynamo.reset()


def test_tensors_have_memory_between_two_graphs():
    @torch._dynamo.disable(
        recursive=False
    )  # like a function at a graph break: it runs eagerly, what it calls may compile
    def between(x):
        return has_memory(x)

    found = []
    torch.compile(lambda x: found.append(between(x.neg())), backend="eager")(torch.ones(2))
    assert found == [True]


def test_within_a_graph_no_tensor_has_memory():
    negated = torch.compile(lambda x: x if has_memory(x) else -x, backend="eager", fullgraph=True)
    assert torch.equal(negated(torch.ones(2)), -torch.ones(2))
