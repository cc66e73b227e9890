"""Helpers for tests of `halfstep.unit_scale`: passes, tensor sizes, and directions of gradients."""

import torch
from torch import Tensor


def output_of(made):
    """The output tensor to which a loss would be applied."""
    return made if isinstance(made, Tensor) else made.logits


def passes(model, args, kwargs, seed=1):
    """A forward pass and a backward pass from N(0, 1) gradients: the output, and each parameter's gradient."""
    model.zero_grad()
    torch.manual_seed(seed)
    output = output_of(model(*args, **kwargs))
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output))
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.detach().clone(), grads


def sizes(model, args, kwargs):
    """Standard deviations of activations, and root mean squares of activation and weight gradients."""
    values, grads, handles = {}, {}, []

    def watch(path):
        def hook(module, inputs, output):
            if isinstance(output, Tensor) and output.requires_grad:
                values[path] = float(output.detach().std())
                output.register_hook(lambda grad: grads.__setitem__(path, float(grad.square().mean().sqrt())))

        return hook

    for path, module in model.named_modules():
        if next(module.children(), None) is None:
            handles.append(module.register_forward_hook(watch(path)))
    _, found = passes(model, args, kwargs)
    for handle in handles:
        handle.remove()
    weights = {name: float(grad.square().mean().sqrt()) for name, grad in found.items() if grad.dim() > 1}
    return values, grads, weights


def off_direction(model, args, kwargs):
    """For each weight, the slope of the function orthogonal to the training gradient as a share of the slope along it,
    by central differences in float64; 0 where that gradient is a multiple of the true one.

    The model must be in float64 and draw no random numbers.
    """
    output = output_of(model(*args, **kwargs)).detach()
    towards = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).double()
    model.zero_grad()
    (output_of(model(*args, **kwargs)) * towards).sum().backward()

    @torch.no_grad()
    def slope(parameter, direction):
        kept, step = parameter.clone(), 1e-4
        ends = []
        for sign in (1, -1):
            parameter.copy_(kept + sign * step * direction)
            ends.append(float((output_of(model(*args, **kwargs)) * towards).sum()))
        parameter.copy_(kept)
        return (ends[0] - ends[1]) / (2 * step)

    found = {}
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.dim() < 2:
            continue
        along = parameter.grad / parameter.grad.norm()
        across = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)).double()
        across = across - (across * along).sum() * along
        ahead = slope(parameter, along)
        assert ahead > 0, f"{name}: the gradient points the other way"
        found[name] = abs(slope(parameter, across)) / ahead
    return found
