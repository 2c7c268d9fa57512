"""Collectives with gradients, as people write them by hand, on plain tensors."""

import torch
import torch.distributed as dist


class Sum(torch.autograd.Function):
    """Add what all ranks have; the gradient is the same for each of them."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Copy(torch.autograd.Function):
    """What all ranks go on with; their gradients are added."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return Sum.forward(ctx, grad, ctx.group), None


class Gather(torch.autograd.Function):
    """Put together what ranks have of a dim; each gets the sum of the gradients of its part, or only its own where ``summed`` is off."""

    @staticmethod
    def forward(ctx, x, dim, group, summed=True):
        ctx.dim, ctx.group, ctx.summed = dim, group, summed
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        grad = Sum.forward(ctx, grad, ctx.group) if ctx.summed else grad
        parts = grad.chunk(dist.get_world_size(ctx.group), ctx.dim)
        return parts[dist.get_rank(ctx.group)].contiguous(), None, None, None


class Exchange(torch.autograd.Function):
    """Send so many rows to each rank, and get so many from each."""

    @staticmethod
    def forward(ctx, x, sent, got, group):
        ctx.sizes = got, sent, group
        out = x.new_empty((sum(got), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), got, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchange.forward(ctx, grad, *ctx.sizes), None, None, None


def average(model, group, but=()):
    """The mean over ranks of the gradients of all parameters but those whose names begin so."""
    for name, parameter in model.named_parameters():
        if not name.startswith(tuple(but)):
            grad = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            dist.all_reduce(grad, group=group)
            grad /= dist.get_world_size(group)
