"""Faults of collectives, as an author of a backend might make them, planted one at a time: each law of the chapter meets its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d
from torch.distributed.nn import functional

from tests.planted.hook import breaks, instead


def swapped(parts: list[torch.Tensor]) -> None:
    """Exchange the values of the last two tensors."""
    if len(parts) > 1 and parts[-1].shape == parts[-2].shape:
        last = parts[-1].clone()
        parts[-1].copy_(parts[-2])
        parts[-2].copy_(last)


@breaks("collective.all-reduce")
def all_reduce_takes_maximum() -> None:
    @instead(dist, "all_reduce")
    def fault(true: Any, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        return true(tensor, dist.ReduceOp.MAX if op == dist.ReduceOp.SUM else op, group, async_op)


@breaks("collective.again")
def all_reduce_takes_sum() -> None:
    @instead(dist, "all_reduce")
    def fault(true: Any, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        return true(tensor, dist.ReduceOp.SUM if op == dist.ReduceOp.MAX else op, group, async_op)


@breaks("collective.mismatch")
def all_reduce_takes_anything() -> None:
    @instead(dist, "all_reduce")
    def fault(true: Any, tensor: Any, *args: Any, **options: Any) -> Any:
        return true(tensor, *args, **options) if isinstance(tensor, torch.Tensor) else None


@breaks("collective.reduce")
def reduce_skips_last_member() -> None:
    @instead(dist, "reduce")
    def fault(true: Any, tensor: Any, *args: Any, **options: Any) -> Any:
        group = options.get("group")
        if dist.get_rank(group) == dist.get_world_size(group) - 1:
            tensor.zero_()
        return true(tensor, *args, **options)


@breaks("collective.broadcast")
def broadcast_from_first_member() -> None:
    @instead(dist, "broadcast")
    def fault(true: Any, tensor: Any, src: Any = None, group: Any = None, async_op: bool = False, group_src: Any = None) -> Any:
        return true(tensor, None, group, async_op, 0)


@breaks("collective.all-gather")
def all_gather_swaps_last_two() -> None:
    @instead(dist, "all_gather")
    def fault(true: Any, parts: Any, *args: Any, **options: Any) -> Any:
        work = true(parts, *args, **options)
        swapped(parts)
        return work


@breaks("collective.inputs-kept")
def all_gather_shares_its_input() -> None:
    @instead(dist, "all_gather")
    def fault(true: Any, parts: Any, tensor: Any, group: Any = None, **options: Any) -> Any:
        work = true(parts, tensor, group, **options)
        parts[dist.get_rank(group)].set_(tensor)
        return work


@breaks("collective.unfinished")
def result_is_not_waited_for() -> None:
    @instead(funcol.AsyncCollectiveTensor, "trigger_wait")
    def fault(true: Any, self: Any) -> torch.Tensor:
        return self.elem


@breaks("collective.waited-twice")
def second_wait_adds_one() -> None:
    class Adds:
        def __init__(self, work: Any, parts: list[torch.Tensor]) -> None:
            self.work, self.parts, self.waited = work, parts, False

        def wait(self) -> None:
            self.work.wait()
            if self.waited:
                self.parts[0].add_(1)
            self.waited = True

    @instead(dist, "all_gather")
    def fault(true: Any, parts: Any, *args: Any, **options: Any) -> Any:
        work = true(parts, *args, **options)
        return Adds(work, parts) if options.get("async_op") else work


@breaks("collective.gather")
def gather_drops_last_element() -> None:
    @instead(dist, "gather")
    def fault(true: Any, tensor: Any, parts: Any = None, *args: Any, **options: Any) -> Any:
        work = true(tensor, parts, *args, **options)
        for part in parts or []:
            part.view(-1)[-1:] = 0
        return work


@breaks("collective.scatter", "collective.composed")
def scatter_swaps_last_two() -> None:
    @instead(dist, "scatter")
    def fault(true: Any, tensor: Any, parts: Any = None, *args: Any, **options: Any) -> Any:
        return true(tensor, None if parts is None else [*parts[:-2], *parts[-2:][::-1]], *args, **options)


@breaks("collective.reduce-scatter")
def reduce_scatter_rotates() -> None:
    @instead(dist, "reduce_scatter_single")
    def fault(true: Any, output: Any, given: Any, *args: Any, **options: Any) -> Any:
        return true(output, given.roll(len(output), 0), *args, **options)


@breaks("collective.all-to-all")
def all_to_all_ignores_splits() -> None:
    @instead(dist, "all_to_all_single")
    def fault(true: Any, output: Any, given: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **options: Any) -> Any:
        even = len(output) == len(given) and len(given) % dist.get_world_size(options.get("group")) == 0
        work = true(output, given, output_split_sizes, input_split_sizes, **options)
        return work if even else (output.copy_(output.flip(0)), work)[1]


class Done:
    """Work that says that it is done whatever happens."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@breaks("collective.async")
def async_returns_before_the_end() -> None:
    kept: list[Any] = []

    @instead(dist, "all_reduce")
    def fault(true: Any, tensor: Any, *args: Any, async_op: bool = False, **options: Any) -> Any:
        if not async_op:
            return true(tensor, *args, **options)
        late = tensor.clone()
        kept.append((late, true(late, *args, async_op=True, **options)))
        return Done()


@breaks("collective.interleaved")
def groups_are_mixed_up() -> None:
    @instead(dist, "all_reduce")
    def fault(true: Any, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        values = torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape)
        work = true(tensor, op, group, async_op)
        if async_op:
            work.wait()
        if group is not None and tensor.is_floating_point():
            tensor.add_(values)
        return work if async_op else None


@breaks("collective.barrier")
def barrier_does_not_wait() -> None:
    @instead(dist, "barrier")
    def fault(true: Any, *args: Any, async_op: bool = False, **options: Any) -> Any:
        return Done() if async_op else None


@breaks("collective.new-group")
def new_group_counts_backwards() -> None:
    @instead(dist, "get_group_rank")
    def fault(true: Any, group: Any, rank: int) -> int:
        return dist.get_world_size(group) - 1 - int(true(group, rank))


@breaks("collective.local-groups")
def local_group_of_one() -> None:
    @instead(dist, "new_group")
    def fault(true: Any, ranks: Any = None, *args: Any, use_local_synchronization: bool = False, **options: Any) -> Any:
        members = [dist.get_rank()] if use_local_synchronization else ranks
        return true(members, *args, use_local_synchronization=use_local_synchronization, **options)


@breaks("collective.subgroups")
def subgroups_dealt_like_cards() -> None:
    """Subgroups of a size take every so many-th rank, and not ranks that follow one another."""

    @instead(c10d, "new_subgroups_by_enumeration")
    def fault(true: Any, lists: Any, *args: Any, **options: Any) -> Any:
        ranks = [rank for each in lists for rank in each]
        return true([ranks[at :: len(lists)] for at in range(len(lists))], *args, **options)


@breaks("collective.send-recv")
def messages_overtake() -> None:
    @instead(dist, "batch_isend_irecv")
    def fault(true: Any, ops: Any) -> Any:
        sends = [op for op in ops if op.op is dist.isend][::-1]
        return true([sends.pop(0) if op.op is dist.isend else op for op in ops])


@breaks("collective.tags")
def tags_are_ignored() -> None:
    @instead(dist, "isend")
    def sent(true: Any, tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> Any:
        return true(tensor, dst, group, 0, group_dst)

    @instead(dist, "irecv")
    def received(true: Any, tensor: Any, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> Any:
        return true(tensor, src, group, 0, group_src)


@breaks("collective.objects")
def objects_of_the_first_member() -> None:
    @instead(dist, "all_gather_object")
    def fault(true: Any, objects: Any, *args: Any, **options: Any) -> Any:
        true(objects, *args, **options)
        objects[-1] = objects[0]


@breaks("collective.dtypes")
def integers_are_refused_late() -> None:
    @instead(dist, "all_reduce")
    def fault(true: Any, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        work = true(tensor, op, group, async_op)
        if tensor.dtype == torch.int64:
            raise TypeError("integers are not carried")
        return work


@breaks("collective.refusals")
def any_root_will_do() -> None:
    @instead(dist, "broadcast")
    def fault(true: Any, tensor: Any, src: Any = None, group: Any = None, async_op: bool = False, group_src: Any = None) -> Any:
        return true(tensor, src, group, async_op, None if src is not None else group_src)


@breaks("collective.backend-refusals")
def lists_of_any_length() -> None:
    @instead(dist, "all_gather")
    def fault(true: Any, tensors: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        size = dist.get_world_size(group)
        missing = [torch.empty_like(tensor) for _ in range(size - len(tensors))]
        return true([*tensors, *missing][:size], tensor, group, async_op)


# Functional collectives


@breaks("collective.functional[all_reduce]")
def functional_reduces_by_maximum() -> None:
    @instead(funcol, "all_reduce")
    def fault(true: Any, tensor: Any, op: str, *args: Any) -> Any:
        return true(tensor, "max" if op == "sum" else op, *args)


@breaks("collective.functional[broadcast]")
def functional_broadcast_from_first() -> None:
    @instead(funcol, "broadcast")
    def fault(true: Any, tensor: Any, src: int, *args: Any) -> Any:
        return true(tensor, 0, *args)


@breaks("collective.functional[all_gather_tensor]")
def functional_gathers_along_first_dim() -> None:
    @instead(funcol, "all_gather_single")
    def fault(true: Any, tensor: Any, dim: int, *args: Any) -> Any:
        return true(tensor, 0, *args)


@breaks("collective.functional[reduce_scatter_tensor]")
def functional_scatters_along_first_dim() -> None:
    @instead(funcol, "reduce_scatter_single")
    def fault(true: Any, tensor: Any, op: str, dim: int, *args: Any) -> Any:
        blocks = funcol.wait_tensor(true(tensor, op, dim, *args))
        return blocks.flip(0)


@breaks("collective.functional[all_to_all_single]")
def functional_exchange_sends_back() -> None:
    @instead(funcol, "all_to_all_single")
    def fault(true: Any, tensor: Any, *args: Any) -> Any:
        got = funcol.wait_tensor(true(tensor, *args))
        return got.flip(0)


@breaks("collective.functional[permute_tensor]")
def functional_permutes_backwards() -> None:
    @instead(funcol, "permute_tensor")
    def fault(true: Any, tensor: Any, to: list[int], *args: Any) -> Any:
        return true(tensor, [to.index(at) for at in range(len(to))], *args)


@breaks(
    "collective.functional[all_reduce_coalesced]",
    "collective.functional[all_gather_coalesced]",
    "collective.functional[reduce_scatter_coalesced]",
)
def functional_coalesced_reversed() -> None:
    for name in ("all_reduce_coalesced", "all_gather_single_coalesced", "reduce_scatter_single_coalesced"):

        @instead(funcol, name)
        def fault(true: Any, *args: Any) -> Any:
            return true(*args)[::-1]


@breaks("collective.compiled", "collective.compiled-functional")
def compiled_reduces_by_maximum() -> None:
    @instead(funcol, "all_reduce")
    def fault(true: Any, tensor: Any, op: str, *args: Any) -> Any:
        return true(tensor, "max" if torch.compiler.is_compiling() else op, *args)


class Doubled(torch.autograd.Function):
    """A tensor whose gradient comes twice."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return 2 * grads[0]


@breaks(
    "collective.functional[all_reduce_coalesced_autograd]",
    "collective.functional[all_gather_coalesced_autograd]",
    "collective.functional[reduce_scatter_coalesced_autograd]",
)
def functional_coalesced_gradient_comes_twice() -> None:
    for name in ("all_reduce_coalesced", "all_gather_single_coalesced", "reduce_scatter_single_coalesced"):

        @instead(funcol, name)
        def fault(true: Any, *args: Any) -> Any:
            first, *others = true(*args)
            return [first, *map(Doubled.apply, others)]


class Local(torch.autograd.Function):
    """A gradient that nobody else adds to."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given)
        return got.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (given,) = ctx.saved_tensors
        return torch.ones_like(given), None


@breaks(
    "collective.functional[all_gather_autograd]",
    "collective.functional[reduce_scatter_autograd]",
    "collective.functional[all_to_all_autograd]",
    "collective.functional[all_reduce_autograd]",
    "collective.functional[broadcast_autograd]",
    "collective.functional[permute_autograd]",
)
def functional_gradient_is_local() -> None:
    gathering = ("all_gather_single_autograd", "reduce_scatter_single_autograd", "all_to_all_single_autograd")
    for name in (*gathering, "all_reduce", "broadcast", "permute_tensor"):

        @instead(funcol, name)
        def fault(true: Any, given: Any, *args: Any) -> Any:
            return Local.apply(given, true(given, *args))


@breaks("collective.autograd[*]")
def gradients_come_twice() -> None:
    functions = [one for one in vars(functional).values() if isinstance(one, type) and "backward" in vars(one)]
    for function in functions:

        @instead(function, "backward")
        def fault(true: Any, ctx: Any, *gradients: Any) -> Any:
            return tuple(None if gradient is None else 2 * gradient for gradient in true(ctx, *gradients))


@breaks("collective.any-source")
def receivers_are_told_of_themselves() -> None:
    for name in ("recv", "recv_object_list"):

        @instead(dist, name)
        def fault(true: Any, *args: Any, **options: Any) -> int:
            true(*args, **options)
            return dist.get_rank()
