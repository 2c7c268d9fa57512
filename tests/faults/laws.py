"""Laws whose checks do what a rank must never do. They join the catalogue through ``SHARDLAW_LAWS``."""

from __future__ import annotations

import _thread
import ctypes
import inspect
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.rank.context import RankContext, Rejected
from shardlaw.conformance.world import protocol
from shardlaw.reference.mesh import Mesh

BAD = 1
GROUPS = 20


def sums(case: Case, here: RankContext) -> None:
    """Nothing is wrong: a sum over all ranks."""
    ones = torch.ones(2)
    dist.all_reduce(ones)
    here.require(ones[0].item() == here.world, "wrong-value", "sum", "the sum is not the number of ranks", here.world, ones)


def nothing(case: Case, here: RankContext) -> None:
    """Nothing happens at all."""


def groups(case: Case, here: RankContext) -> None:
    """Many process groups are made, and left."""
    for _ in range(GROUPS):
        dist.new_group(list(range(here.world)))


def sends(case: Case, here: RankContext) -> None:
    """Two ranks exchange a message, of which the others know nothing."""
    if here.rank == 0:
        dist.send(torch.ones(2), 1)
    elif here.rank == 1:
        dist.recv(torch.zeros(2), 0)


def wrong(case: Case, here: RankContext) -> None:
    print("I am rank", here.rank)
    here.require(here.rank != BAD, "wrong-value", "rank", "this rank is bad", 0, 1)


def rejects(case: Case, here: RankContext) -> None:
    here.reject("it means nothing")


def raises_alone(case: Case, here: RankContext) -> None:
    if here.rank == BAD:
        raise ValueError("alone 17")


def raises_while_others_wait(case: Case, here: RankContext) -> None:
    if here.rank == BAD:
        raise ValueError("alone 17")
    dist.all_reduce(torch.ones(2))


def wrong_while_others_wait(case: Case, here: RankContext) -> None:
    if here.require(here.rank != BAD, "wrong-value", "rank", "this rank is bad", 0, 1):
        dist.all_reduce(torch.ones(2))


def those_inside_wait_for_all(case: Case, here: RankContext) -> None:
    """The ranks of the mesh wait for those outside it."""
    if here.rank in case.mesh().ranks:
        dist.all_reduce(torch.ones(2))


def raises_alike(case: Case, here: RankContext) -> None:
    print("about to raise")
    raise RuntimeError("together")


def raises_alike_after_sum(case: Case, here: RankContext) -> None:
    sums(case, here)
    raise RuntimeError("together")


def raises_differently(case: Case, here: RankContext) -> None:
    raise ValueError("odd") if here.rank % 2 else RuntimeError("even")


def raises_exit(case: Case, here: RankContext) -> None:
    sys.exit("let me out")


def raises_textless(case: Case, here: RankContext) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ValueError

    raise Broken


def exits(case: Case, here: RankContext) -> None:
    if here.rank == BAD:
        os._exit(3)
    dist.all_reduce(torch.ones(2))


def killed(case: Case, here: RankContext) -> None:
    if here.rank == BAD:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(2))


def aborts(case: Case, here: RankContext) -> None:
    if here.rank == BAD:
        print("terminate called", file=sys.stderr)
        os.abort()
    dist.all_reduce(torch.ones(2))


def terminates(case: Case, here: RankContext) -> None:
    """As C++ does with an exception that a thread of gloo does not catch."""
    if here.rank == BAD:
        ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
    dist.all_reduce(torch.ones(2))


def overruns(case: Case, here: RankContext) -> None:
    """Local tensors of other sizes than their layout has: gloo ends the process while it gathers them."""
    local = torch.ones(3000 if here.rank == BAD else 1)
    DTensor.from_local(local, here.mesh(Mesh((here.world,))), [Shard(0)], run_check=False, shape=(6, 1), stride=(1, 1)).full_tensor()


def unfinished(case: Case, here: RankContext) -> None:
    """All ranks start a sum and none waits for it."""
    dist.all_reduce(torch.ones(1 << 12), async_op=True)


def joins_alone(case: Case, here: RankContext) -> None:
    if here.rank == BAD:
        dist.all_reduce(torch.ones(2))


def starts_alone(case: Case, here: RankContext) -> None:
    if here.rank == BAD:
        here.unfinished = dist.all_reduce(torch.ones(2), async_op=True)  # type: ignore[attr-defined]


def all_wait(case: Case, here: RankContext) -> None:
    print("waiting")
    if here.rank == BAD:
        dist.recv(torch.ones(2), src=(BAD + 1) % here.world)
    else:
        dist.barrier()


def mismatched_shape(case: Case, here: RankContext) -> None:
    dist.all_reduce(torch.ones(2 if here.rank == BAD else 3000))


def mismatched_dtype(case: Case, here: RankContext) -> None:
    dist.all_reduce(torch.ones(64, dtype=torch.float64 if here.rank == BAD else torch.int8))


def spins(case: Case, here: RankContext) -> None:
    while here.rank == BAD:
        pass
    dist.all_reduce(torch.ones(2))


def prints_without_end(case: Case, here: RankContext) -> None:
    while here.rank == BAD:
        print("x" * 1000)


def eats_memory(case: Case, here: RankContext) -> None:
    kept = []
    while here.rank == BAD:
        kept.append(torch.empty(1 << 28))


def stopped(case: Case, here: RankContext) -> None:
    if here.rank == BAD:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(2))


def destroys_group(case: Case, here: RankContext) -> None:
    if here.rank == BAD:
        dist.destroy_process_group()


def all_destroy_group(case: Case, here: RankContext) -> None:
    dist.barrier()
    dist.destroy_process_group()


def _stream() -> int:
    """The descriptor of this rank's stream to the driver: its one unix socket."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(number)) as found:
                if found.family == socket.AF_UNIX:
                    return number
        except OSError:
            continue
    raise AssertionError("no stream")


def closes_stream(case: Case, here: RankContext) -> None:
    if here.rank == BAD:
        stream = _stream()
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), stream)
        time.sleep(60)


def babbles(case: Case, here: RankContext) -> None:
    if here.rank == BAD:
        os.write(_stream(), b"\0\0\0\3what?")
        time.sleep(60)


def garbles(case: Case, here: RankContext) -> None:
    pack = protocol.pack_answer
    if here.rank == BAD:
        protocol.pack_answer = lambda *said: msgspec.structs.replace(pack(*said), evidence=b"overwritten")


def leaves_thread(case: Case, here: RankContext) -> None:
    if here.rank == BAD:
        threading.Thread(target=time.sleep, args=(60,), daemon=True, name="left").start()


def leaves_foreign_thread(case: Case, here: RankContext) -> None:
    """As torch's threads for gradients on a GPU: not begun by Python, and seen by it since they run some of it."""
    seen = threading.Event()

    def runs() -> None:
        threading.current_thread()
        seen.set()
        time.sleep(60)

    _thread.start_new_thread(runs, ())
    seen.wait(30)


def means_nothing(case: Case, here: RankContext) -> None:
    raise Rejected("the case asks for nothing")


def dies_later(case: Case, here: RankContext) -> None:
    """The rank ends between cases, by a timer that no Python thread shows."""
    if here.rank == BAD:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.05)


def disturbs(case: Case, here: RankContext) -> None:
    """Changes what the whole process shares; the next case must not see it."""
    here.require(torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled(), "wrong-metadata", "state", "disturbed")
    here.require(torch.rand(()).item() == torch.rand((), generator=torch.Generator().manual_seed(torch.initial_seed())).item(),
                 "wrong-value", "rng", "the generator is not where it was")  # fmt: skip
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.rand(random.randrange(1, 9))


def remembers(case: Case, here: RankContext) -> None:
    """Holds unless the same world has served ``marks`` before: a fault of history."""
    here.require("MARKED" not in os.environ, "wrong-value", "history", "this world is marked")


def marks(case: Case, here: RankContext) -> None:
    os.environ["MARKED"] = "yes"


def passes_on(case: Case, here: RankContext) -> None:
    """Two worlds: what the first wrote, the second reads, whatever its size."""
    note = Path(here.folder()) / "note"
    size = case.integer("second" if here.stage else "first")
    here.require(here.world == size, "wrong-value", "world", "a world of another size", size, here.world)
    if here.stage == 0:
        if here.rank == 0:
            note.write_text(case.text)
    else:
        here.require(
            here.world == case.integer("second"), "wrong-value", "world", "a world of another size", case.get("second"), here.world
        )
        here.require(note.read_text() == case.text, "wrong-value", "note", "the folder is not shared")
    here.require(case.get("bad", "no") != str(here.stage), "wrong-value", "stage", "this stage is bad")


def deposits(case: Case, here: RankContext) -> None:
    """A partial result, judged by the driver; ``off`` is what one rank adds to it."""
    from shardlaw.reference.layout import Layout

    mesh = case.meshes[0]
    full = case.tensor("x").build(case.seed)
    local = here.dtensor(full, Layout(tuple(full.shape), mesh, case.tensor("x").placements or ()))
    if here.rank == BAD and "off" in case:
        local.to_local().add_(case.integer("off"))
    here.same_dtensor(local, full, "partial")


def kills_server(case: Case, here: RankContext) -> None:
    """Once."""
    mark = Path(here.folder()) / "killed"
    if here.rank == BAD and not mark.exists():
        mark.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)


CHECKS = [value for name, value in list(globals().items()) if inspect.isfunction(value) and not name.startswith("_")]
LAWS = [
    Law(
        f"fault.rank[{check.__name__}]",
        check.__doc__ or "A rank misbehaves.",
        "the tests of worlds",
        f"fault.rank[{check.__name__}] world=3",
        check,
        sweep=lambda limits: (),  # tests name their cases
        sweeps=1,
        needs=("p2p",) if check is sends else (),
        stages=(lambda case: (case.integer("first"), case.integer("second"))) if check is passes_on else None,
    )
    for check in CHECKS
]
