"""Parts that the data does not reach are reported: experts without tokens, list members that did not run."""

import torch
from torch import nn

import halfstep
from halfstep.probe.trial import unreached


class Mixture(nn.Module):
    """Sends row i to expert i modulo `used`; experts are a ModuleList, or fused in one parameter."""

    def __init__(self, experts, used, fused):
        super().__init__()
        self.used = used
        if fused:
            self.up_proj = nn.Parameter(torch.randn(experts, 8, 8))
            self.down_proj = nn.Parameter(torch.randn(experts, 8, 8))
        else:
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))

    def forward(self, x):
        chosen = torch.arange(len(x)) % self.used
        if hasattr(self, "experts"):
            return torch.stack([self.experts[int(e)](row) for e, row in zip(chosen, x, strict=True)])
        inner = torch.bmm(x[:, None], self.up_proj[chosen])
        return torch.bmm(torch.relu(inner) + 0.1 * inner, self.down_proj[chosen])[:, 0]


def test_experts_without_a_token_are_counted_over_all_batches():
    for fused, where in ((True, "1 (Mixture)"), (False, "1.experts (ModuleList)")):
        model = nn.Sequential(nn.Linear(8, 8), Mixture(6, 4, fused))
        batches = [torch.randn(2, 8), torch.randn(3, 8)]  # experts 0 and 1, then 0 to 2
        report = halfstep.probe_model(model, "bf16", data=batches)
        assert report.conditions.unreached == (f"3 of 6 in {where}",)
        assert f"no gradient from this data reached 3 of 6 in {where}" in str(report)
        assert report.to_dict()["conditions"]["unreached"] == (f"3 of 6 in {where}",)
        assert report.safe
        assert halfstep.probe_model(model, "bf16", data=[torch.randn(6, 8)]).conditions.unreached == (
            f"2 of 6 in {where}",
        )


def test_frozen_modules_are_not_reported_as_unreached():
    model = nn.ModuleDict({"frozen": nn.ModuleList([nn.Linear(2, 2)]), "free": nn.ModuleList([nn.Linear(2, 2)])})
    model["frozen"].requires_grad_(False)
    assert list(unreached(model, {})) == ["1 of 1 in free (ModuleList)"]
    assert list(unreached(model, {"free.0.bias": torch.tensor([False, True])})) == []


def test_scalar_and_empty_parameters_are_probed():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.gain, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 4))

        def forward(self, x):
            return torch.cat([self.gain * self.inner(x), self.none])

    report = halfstep.probe_model(Odd(), data=[torch.randn(3, 4)])
    assert report.safe
    assert report.conditions.unreached == ()


def test_codebook_formats_have_no_sensitivity():
    report = halfstep.probe_model(nn.Linear(4, 4), "nf4", data=[torch.rand(3, 4)])
    assert "sensitivity:" not in str(report)
