"""The process group: every collective is letters to members, letters from members, and what to do once all of them are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce as fold
from typing import Any

import torch
import torch.distributed as dist

from pypost.faults import planted
from pypost.office import office
from pypost.works import Mail, Together

Letters = Mapping[int, torch.Tensor]

# what each reduction makes of two contributions, and the dtypes that it takes
REDUCTIONS: dict[Any, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], str]] = {
    dist.ReduceOp.SUM: (torch.add, "any"),
    dist.ReduceOp.AVG: (torch.add, "inexact"),
    dist.ReduceOp.PRODUCT: (torch.mul, "any"),
    dist.ReduceOp.MIN: (torch.minimum, "ordered"),
    dist.ReduceOp.MAX: (torch.maximum, "ordered"),
    dist.ReduceOp.BAND: (torch.bitwise_and, "exact"),
    dist.ReduceOp.BOR: (torch.bitwise_or, "exact"),
    dist.ReduceOp.BXOR: (torch.bitwise_xor, "exact"),
}


class PostGroup(dist.ProcessGroup):
    """A process group of ``pypost``. Positions are ranks within the group."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        backwards = planted("group-order") and len(options.global_ranks_in_group) > 0
        self._places = range(options.group_size)[:: -1 if backwards else 1]
        self._position = self._places[options.group_rank]
        self._everybody = range(options.group_size)
        self._store = options.store
        self._id = options.group_id
        self._seconds = options.timeout.total_seconds()
        self._turn = 0
        self._messages: dict[tuple[int, int, int], int] = {}
        self._addresses: dict[int, str] = {}
        self._store.set(f"pypost/{self._position}", office().address)

    # What torch asks a group for

    def getBackendName(self) -> str:
        return "pypost"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_desc(self) -> str:
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> PostGroup:
        """From torch 2.15 on a batch of messages asks what the backend of a device can do: there is none but the group."""
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether it gives memory of its own to what is communicated."""
        return False

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has begun: by it others see whether all members are in step."""
        return self._turn

    def shutdown(self) -> None:
        """Nothing to end: lines belong to the process."""

    # Letters

    def _address(self, position: int) -> str:
        if position not in self._addresses:
            self._addresses[position] = self._store.get(f"pypost/{position}").decode()
        return self._addresses[position]

    def _post(
        self, call: str, opts: Any, out: Letters, rooms: Letters, finish: Callable[[list[torch.Tensor]], None], results: Any = ()
    ) -> Mail:
        """Send ``out``, by position, and expect a letter from each position of ``rooms``, of the shape and dtype of what stands there.
        ``finish`` gets what came, in the order of ``rooms``. ``call`` is what every member must have called, in words; the future of the
        work has the ``results``."""
        for position in (*out, *rooms):
            if position not in self._everybody:
                raise ValueError(f"pypost: the group has no member {position}, it has {len(self._everybody)}")
        odd = [x for x in (*out.values(), *rooms.values()) if x.is_quantized or x.is_nested or x.layout is not torch.strided]
        if odd:
            raise NotImplementedError(f"pypost: a tensor of {odd[0].dtype} in the layout {odd[0].layout} cannot be sent")
        turn = self._turn
        self._turn += 1
        work = Mail(len(rooms), self._seconds, early=planted("lost-wait") and getattr(opts, "asyncOp", False), results=results)
        came: dict[int, bytes] = {}
        for position, x in out.items():
            office().send(self._address(position), (self._id, turn, self._position, position), packed(x, call))
        for position in rooms:

            def take(letter: bytes, position: int = position) -> None:
                came[position] = letter
                work.arrived(lambda: finish([unpacked(came[at], room, call) for at, room in rooms.items()]))

            office().expect((self._id, turn, position, self._position), take)
        if not rooms:
            work.arrived(lambda: None)
        return work

    # Collectives

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Mail:
        (x,), op = tensors, operation(opts, tensors)
        call = f"all_reduce {op} {described(x)}"
        return self._post(call, opts, self._all(x), self._all(x), lambda came: write(x, reduced(came, op)), results=[x])

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Mail:
        (x,), op = tensors, operation(opts, tensors)
        rooms = self._all(x) if self._position == opts.rootRank else {}
        return self._post(f"reduce {op} {described(x)}", opts, {opts.rootRank: x}, rooms, lambda came: write(x, reduced(came, op)))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Mail:
        (x,) = tensors
        out = self._all(x) if self._position == opts.rootRank else {}
        return self._post(f"broadcast {x.dtype}", opts, out, {opts.rootRank: x}, lambda came: write(x, came[0]))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Mail:
        (outs,), (x,) = outputs, inputs
        self._want_one_each(outs, "output")
        alike(x, outs[self._position])
        return self._post(f"all_gather {x.dtype}", opts, self._all(x), dict(enumerate(outs)), lambda came: write_all(outs, gathered(came)))

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Mail:
        if output.numel() != len(self._everybody) * x.numel() or output.dtype != x.dtype:
            raise ValueError(f"pypost: {len(self._everybody)} tensors of {x.numel()} {x.dtype} do not fill {output.numel()} {output.dtype}")
        return self._post(
            f"all_gather_single {x.dtype}",
            opts,
            self._all(x),
            self._all(x),
            lambda came: write(output, torch.stack(gathered(came)).reshape(output.shape)),
        )

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Mail:
        (x,), outs = inputs, outputs[0] if self._position == opts.rootRank else []
        if self._position == opts.rootRank:
            self._want_one_each(outs, "output")
        return self._post(f"gather {x.dtype}", opts, {opts.rootRank: x}, dict(enumerate(outs)), lambda came: write_all(outs, came))

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Mail:
        (out,), given = outputs, inputs[0] if self._position == opts.rootRank else []
        if self._position == opts.rootRank:
            self._want_one_each(given, "input")
        return self._post(f"scatter {out.dtype}", opts, dict(enumerate(given)), {opts.rootRank: out}, lambda came: write(out, came[0]))

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Mail:
        (out,), (given,), op = outputs, inputs, operation(opts, outputs)
        self._want_one_each(given, "input")
        alike(given[self._position], out)
        return self._post(
            f"reduce_scatter {op} {out.dtype}",
            opts,
            dict(enumerate(given)),
            self._all(out),
            lambda came: write_result(out, reduced(came, op)),
        )

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> Mail:
        if len(self._everybody) * output.numel() != x.numel() or output.dtype != x.dtype:
            raise ValueError(f"pypost: {x.numel()} {x.dtype} are not {len(self._everybody)} times {output.numel()} {output.dtype}")
        parts = x.reshape(len(self._everybody), *output.shape)
        return self.reduce_scatter([output], [list(parts)], opts)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Mail:
        self._want_one_each(outputs, "output")
        self._want_one_each(inputs, "input")
        return self._post("all_to_all", opts, dict(enumerate(inputs)), dict(enumerate(outputs)), lambda came: write_all(outputs, came))

    def all_to_all_single(
        self, output: torch.Tensor, x: torch.Tensor, output_splits: Sequence[int], splits: Sequence[int], opts: Any = None
    ) -> Mail:
        if x.dtype != output.dtype:
            raise ValueError(f"pypost: {x.dtype} cannot arrive as {output.dtype}")
        return self.alltoall(self._cut(output, output_splits), self._cut(x, splits), opts)

    def barrier(self, opts: Any = None) -> Mail:
        nothing = self._all(torch.empty(0))
        return self._post("barrier", opts, nothing, nothing, lambda came: None)

    # Several at once

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Together:
        return Together([self.allreduce([x], opts) for x in tensors])

    def all_gather_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Together:
        return Together([self.all_gather_single(out, x, opts) for out, x in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Together:
        return Together([self.reduce_scatter_single(out, x, opts) for out, x in zip(outputs, inputs, strict=True)])

    # Messages between two members

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Mail:
        (x,) = tensors
        office().send(self._address(to), self._message(self._position, to, tag), packed(x, "send"))
        work = Mail(0, self._seconds)
        work.arrived(lambda: None)
        return work

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Mail:
        (x,) = tensors
        work = Mail(1, self._seconds)
        work.source = source
        key = self._message(source, self._position, tag)
        office().expect(key, lambda letter: work.arrived(lambda: write(x, unpacked(letter, x, "send"))))
        return work

    def _message(self, source: int, to: int, tag: int) -> tuple[Any, ...]:
        """The key of the next message between two members under a tag: both count them alike."""
        number = self._messages.get((source, to, tag), 0)
        self._messages[source, to, tag] = number + 1
        return (self._id, "message", source, to, tag, number)

    # Names that older versions of torch call

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _all(self, x: torch.Tensor) -> Letters:
        return dict.fromkeys(self._everybody, x)

    def _cut(self, x: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
        """The rows of ``x`` that belong to each member: as many for each, where nothing else is said."""
        size = len(self._everybody)
        if not splits and x.shape[0] % size:
            raise ValueError(f"pypost: {x.shape[0]} rows cannot be shared out among {size} members")
        sizes = list(splits) or [x.shape[0] // size] * size
        if sum(sizes) != x.shape[0]:
            raise ValueError(f"pypost: splits {sizes} do not add up to {x.shape[0]} rows")
        return list(x.split(sizes))

    def _want_one_each(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        if len(tensors) != len(self._everybody):
            raise ValueError(f"pypost: {len(tensors)} {what}s for {len(self._everybody)} members")


def create(options: Any, more: Any) -> PostGroup:
    """What torch calls for each new group of this process."""
    return PostGroup(options)


def packed(x: torch.Tensor, call: str) -> bytes:
    """A letter: the call that it is for, a line end, and the elements of a tensor in order."""
    elements = x.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return call.encode() + b"\n" + elements


def unpacked(letter: bytes, like: torch.Tensor, call: str) -> torch.Tensor:
    """A tensor of the shape and dtype of ``like``. Raises ``ValueError`` where the letter is for another call or has another length."""
    theirs, _, letter = letter.partition(b"\n")
    if theirs != call.encode():
        raise ValueError(f"pypost: a member called {theirs.decode()}, this one {call}")
    if len(letter) != like.numel() * like.element_size():
        raise ValueError(f"pypost: {len(letter)} bytes came for {like.numel()} {like.dtype}")
    return torch.frombuffer(bytearray(letter), dtype=like.dtype).reshape(like.shape) if letter else torch.empty_like(like)


def operation(opts: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The reduction that is asked for, a sum if none is. Raises ``ValueError`` where this backend has none for the dtype."""
    dtype, asked = tensors[0].dtype, dist.ReduceOp(dist.ReduceOp.SUM) if opts is None else opts.reduceOp
    inexact, complex_ = dtype.is_floating_point or dtype.is_complex, dtype.is_complex
    fits = {"any": True, "inexact": inexact, "exact": not inexact, "ordered": not complex_}
    for op, (_, takes) in REDUCTIONS.items():  # a ReduceOp knows its kinds, these do not know it
        if asked == op and fits[takes]:
            return op
    raise ValueError(f"pypost: no such reduction of {dtype}")


def reduced(parts: list[torch.Tensor], op: Any) -> torch.Tensor:
    """The reduction of what all members gave, in the order of the group, so that every member gets the same bits."""
    if planted("wrong-reduction") and len(parts) > 1:
        parts = parts[:-1]
    whole = fold(REDUCTIONS[op][0], parts)
    return whole / len(parts) if op == dist.ReduceOp.AVG else whole


def gathered(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """What all members gave, in the order of the group."""
    if planted("swapped-ranks") and len(parts) > 1:
        parts = [*parts[:-2], parts[-1], parts[-2]]
    return parts


def described(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def alike(x: torch.Tensor, room: torch.Tensor) -> None:
    if x.dtype != room.dtype or x.numel() != room.numel():
        raise ValueError(f"pypost: {x.numel()} {x.dtype} do not fit into {room.numel()} {room.dtype}")


def write(room: torch.Tensor, x: torch.Tensor) -> None:
    with torch.inference_mode() if room.is_inference() else torch.no_grad():  # as the thread that made the room, which is another one
        room.copy_(x)


def write_all(rooms: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    for room, part in zip(rooms, parts, strict=True):
        write(room, part)


def write_result(room: torch.Tensor, x: torch.Tensor) -> None:
    """Write the result of a reduce_scatter."""
    if planted("dropped-last") and x.numel():
        x = x.clone()
        x.view(-1)[-1] = room.reshape(-1)[-1]
    write(room, x)
