"""Laws on what a saved state may hold: values of every kind, objects with state, and what a load may leave out or must refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.law import Law, Limits
from conformance.laws.roundtrip import scripts as roundtrip_scripts
from conformance.laws.roundtrip.cases import law_of, trips
from reference.checkpoint.state_dict import (
    FlattenError,
    Path,
    Slot,
    State,
    Stateful,
    flatten,
    format_state,
    parse_state,
    slots,
    spoiled,
    unflatten,
)
from strategies.state_dicts import state_dicts

DOCS = "torch.distributed.checkpoint docs"
LOAD = f"{DOCS}, load"


def check_stateful(case: Case, here: Here) -> None:
    """Objects with state are loaded through their own ``load_state_dict``, once, with what was saved."""
    trip = t.read_trip(case)
    if here.stage == 0:
        t.save(trip, here)
        return
    state = t.destination(trip, here)
    apps = {key: value for key, value in state.items() if isinstance(value, t.App)}
    t.judge(trip, here, t.load(here, state))
    for key, app in apps.items():
        here.require(state[key] is app, "wrong-metadata", "identity", f"{key} is another object after the load")
        here.require(app.loads == 1, "wrong-metadata", "calls", f"load_state_dict of {key} was called {app.loads} times", 1, app.loads)


def check_subset(case: Case, here: Here) -> None:
    """What the destination names and the checkpoint has is loaded; what only one of them has changes nothing."""
    trip = t.read_trip(case)
    if here.stage == 0:
        t.save(trip, here)
        return
    want, kept, partial = after_subset(trip)
    planner = t.dcp.DefaultLoadPlanner(allow_partial_load=True) if partial else None
    t.judge(trip, here, t.load(here, t.destination(trip, here), planner=planner), want=want, kept=kept)


def after_subset(trip: t.Trip) -> tuple[State, set[str], bool]:
    """What the destination must hold, which tensors in it stay as they were, and whether anything does."""
    saved, into = flatten(trip.save.state), flatten(trip.load.state)
    unsaved = {path for name, (path, _) in into.items() if name not in saved}
    kept = {leaf.name for name, (_, leaf) in into.items() if name not in saved and isinstance(leaf, Slot)}
    return spoiled_at(trip.load.state, unsaved), kept, bool(unsaved)


def spoiled_at(state: State, paths: set[Path]) -> State:
    """``state`` with the leaves at ``paths`` as the destination held them before."""

    def visit(path: Path, value: object) -> object:
        if path in paths:
            return spoiled(value)
        if isinstance(value, Stateful):
            return Stateful({key: visit((*path, str(key)), entry) for key, entry in value.state.items()})
        if isinstance(value, dict):
            return {key: visit((*path, str(key)), entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [visit((*path, at), entry) for at, entry in enumerate(value)]
        return value

    return {key: visit((key,), value) for key, value in state.items()}


def check_refused_load(case: Case, here: Here) -> None:
    """A load that cannot be right is refused by all ranks alike, names the culprit, and changes nothing."""
    trip = t.read_trip(case)
    if here.stage == 0:
        t.save(trip, here)
        return
    state = t.destination(trip, here)
    refuse(here, lambda: t.load(here, state), "load", case.get("culprit"))
    # nothing may be half loaded
    t.judge(trip, here, state, check="kept", want=spoiled(trip.load.state), kept=slots(trip.load.state))


def check_refused_save(case: Case, here: Here) -> None:
    """A state that cannot be saved is refused by all ranks alike, and the checkpoint that was there still loads."""
    trip = t.read_trip(case)
    if here.stage == 0:
        t.save(trip, here)
        other = replace(trip.save, state=trip.load.state)
        bad = t.build(other, lambda name: t.placed(here, other, name, trip.values[name], torch.clone))
        refuse(here, lambda: t.save(trip, here, bad), "save", case.get("culprit"))
        return
    good = t.Trip(trip.save, trip.save, trip.worlds, trip.values, trip.writer, trip.planner)
    t.judge(good, here, t.load(here, t.destination(good, here)), check="kept")


def refuse(here: Here, attempt: Callable[[], object], check: str, culprit: str) -> None:
    """``attempt`` must raise a ``CheckpointException`` that names ``culprit``."""
    said: list[str] = []

    def tried() -> None:
        try:
            attempt()
        except t.CheckpointFailed as error:
            said.append(str(error).splitlines()[0])
            raise

    if here.refused(tried, check, f"a {check} that cannot be right", errors=(t.CheckpointFailed,)):
        here.require(culprit in said[0], "wrong-error", f"{check} message", f"the refusal does not name {culprit!r}", culprit, said[0])


KINDS = (
    'mesh=2 x=4:S(0) state={a:{n:5,w:x},b:b"ab",c:"text",d:None,e:1.5,f:True,g:[1,2.0,"x"],h:(1,(2,None)),i:[],j:{},k:{1,2},l:7}',
    'mesh=2 mesh.load=3 x=5x2:S(0) y=3:R:int64 state={opt:{state:{w:{step:y,m:x}},groups:[{lr:0.1,names:["w"]},{lr:0.2,names:["b"]}]}}',
    "mesh=2 mesh.load=1 x=4:- y=3:S(0):bool state={l:[x,y,3],n:[[x],[1,2]],t:(x,1),u:[(x,),{q:1}]} to.y=R",
    'mesh=2 x=3:R state={"a.b":x,a:{c:1},"1":2,d:{"e.f":{g:x,h:"v"}},Z:0,_:b""}',
    "mesh=3 mesh.load=2 x=7:S(0) y=2x2:R:float64 state={m:{a:{b:{c:x}},d:{e:y}},n:-3,s:{x:1,y:None}}",
    "mesh=1 mesh.load=2 x=4:S(0) state={a:x,b:x,c:[x,[x,5]],z:1+2j}",
    "mesh=2 x=4:S(0) y=3:R state={o:{0:{m:x},1:{m:y}}}",
    "mesh=2 x=4:S(0) state={o:{0:{m:x,step:3}}}",
    "mesh=2 x=4:S(0) state={x:x,u:[1,{}]}",
)
STATEFUL = (
    "mesh=2 mesh.load=3 x=5:S(0) y=2x3:R state={app:stateful({w:x,n:3}),y:y}",
    'mesh=2 x=4:S(0) state={a:stateful({n:1,m:{p:b"q",r:[x,2]}}),b:stateful({n:2}),n:0}',
    "mesh=3 mesh.load=1 x=4x2:S(1) state={a:stateful({w:x,s:None}),x:x}",
    "mesh=2@0,2 mesh.load=2 x=5:S(0):int64 state={a:stateful({w:x,t:(1,2)})}",
)
SUBSET = (
    "mesh=2 mesh.load=3 x=5:S(0) y=3:R state={x:x,y:y,n:1,d:{p:2,q:y}} into={x:x}",
    "mesh=2 x=5:S(0) y=3:S(0):int64 state={d:{p:1,q:x},e:2,f:y} into={d:{p:1},f:y}",
    "mesh=2 mesh.load=1 x=4x2:S(0) y=3:R state={x:x} into={x:x,y:y,n:4,d:{p:None}}",
    "mesh=3 mesh.load=2 x=7:S(0) y=4:S(0) z=2:R state={a:{x:x,n:1},z:z} into={a:{x:x,y:y,m:2},z:z,l:[y,1]}",
    "mesh=2 x=4:S(0) y=3:R state={x:x} into={x:x,s:{1,2},c:1j}",
    "mesh=2 mesh.load=3 x=5x2:S(0) y=7:S(0):int64 state={x:x} into={x:x,y:y} held.load=sharded",
    "mesh=2 x=4x3:S(0) y=4x2:S(0) state={x:x} into={x:x,y:y} held.load=wrapper cut.load=1@0,3@1",
    "mesh=2 x=5:S(0) y=3:R state={x:x} into={x:x,app:stateful({w:y,n:1})}",
    "mesh=3@2,0,1 mesh.load=2@0,2 x=5:S(0) y=0x3:S(0) z=():R state={x:x} into={o:{0:{m:y}},x:x,z:z}",
    'mesh=2 x=4:S(0) y=3:-:bool state={x:x} into={x:x,y:y,t:(1,2),"d.e":b"ab",l:[1,2]}',
    "mesh=2 mesh.load=3 x=5x2:S(0) y=7:S(0):int64 state={x:x,y:y,n:1} into={x:x} held=sharded",
    "mesh=2 x=4x3:S(0) y=4x2:S(0) state={x:x,y:y} into={y:y} held=wrapper cut=1@0,3@1 held.load=sharded",
    "mesh=2 x=5:S(0) y=3:R state={app:stateful({w:y,n:1}),x:x,l:[x,1]} into={app:stateful({n:1})}",
)
REFUSED_LOADS = {
    "missing": (
        "mesh=2 x=5:S(0) y=4:S(0) state={x:x} into={x:x,y:y} culprit=y",
        "mesh=2 mesh.load=3 x=5:S(0) state={x:x} into={x:x,d:{n:1}} culprit=d.n",
        "mesh=2 x=5:R y=4:- state={x:x} into={a:y,x:x} culprit=a",
        "mesh=2 x=5:S(0) y=3:R state={l:[x]} into={l:[x,y]} culprit=l.1",
        "mesh=2 mesh.load=3 x=5x2:S(0) y=7:S(0):int64 state={x:x} into={x:x,y:y} held.load=sharded culprit=y",
        "mesh=2 x=5x2:S(0) y=5x3:S(0) state={x:x} into={x:x,y:y} held.load=sharded cut.load=5@1 culprit=y",
        "mesh=2 x=4x3:S(0) y=4x2:S(0) state={x:x} into={x:x,y:y} held.load=wrapper cut.load=1@0,3@1 culprit=y",
        "mesh=2 x=5:S(0) y=3:R state={x:x} into={x:x,app:stateful({w:y})} culprit=app.w",
        "mesh=2 x=5:S(0) state={x:x} into={x:x,app:stateful({n:1})} culprit=app.n",
        "mesh=3 mesh.load=2@1,2 world.load=3 x=5:S(0) y=4:S(0):int64 state={x:x} into={x:x,y:y} culprit=y",
        "mesh=2 mesh.load=1 x=5:S(0) y=0x3:S(0) state={x:x} into={x:x,o:{0:{m:y}}} culprit=o.0.m",
        "mesh=2x2 mesh.load=2 x=4x4:S(0),S(1) y=():- to.x=S(0) to.y=R state={x:x} into={x:x,y:y} culprit=y",
        'mesh=2 x=5:S(0) y=3:-:bool state={x:x} into={x:x,d:{"e.f":y}} culprit=d.e.f',
        'mesh=2 x=5:S(0) state={x:x} into={x:x,b:b"ab"} culprit=b',
        "mesh=2 x=5:S(0) state={x:x} into={x:x,l:[1,(2,None)]} culprit=l",
        "mesh=2 x=5:S(0) y=8:S(0) state={x:x} into={y:y} held.load=sharded culprit=y",
    ),
    "size": (
        "mesh=2 x=5x6:S(0) y=5x5:S(0) state={a:x} into={a:y} culprit=a",
        "mesh=2 mesh.load=3 x=5:S(0) y=6:R state={b:x,a:x} into={b:x,a:y} culprit=a",
        "mesh=2 x=4x1:S(0) y=4:S(0) state={a:x} into={a:y} culprit=a",
        "mesh=2 x=():R y=1:R state={a:x} into={a:y} culprit=a",
        "mesh=2 x=4:- y=3:- state={a:x} into={a:y} culprit=a",
        "mesh=2 mesh.load=3 x=5x6:S(0) y=5x7:S(0) state={a:x} into={a:y} held.load=sharded culprit=a",
        "mesh=2 x=5x6:S(1) y=4x6:S(1) z=3:S(0) state={a:x,z:z} into={a:y,z:z} held.load=wrapper culprit=a",
        "mesh=2 x=5x6:S(0) y=4x6:S(0) state={a:x} into={a:y} held=wrapper cut=1@0,4@1 culprit=a",
        "mesh=2 x=5:S(0) y=0:S(0) z=3:R state={app:stateful({w:x}),z:z} into={app:stateful({w:y}),z:z} culprit=app.w",
        "mesh=3 mesh.load=2@1,2 world.load=3 x=5:S(0) y=4:S(0) z=3:- state={a:x,z:z} into={a:y,z:z} culprit=a",
    ),
    "kind": (
        "mesh=2 x=4:S(0) state={a:x} into={a:5} culprit=a",
        'mesh=2 x=4:R state={a:x,b:x} into={a:"text",b:x} culprit=a',
        "mesh=2 mesh.load=1 x=4:- state={a:{b:x}} into={a:{b:None}} culprit=a.b",
        "mesh=1 mesh.load=3 x=4:S(0) state={l:[x]} into={l:[(1,2)]} culprit=l",
        "mesh=3 mesh.load=2 x=4x2:S(1):bool state={a:x} into={a:[]} culprit=a",
        "mesh=2 x=4x2:S(0) z=3:- state={a:x,z:z} into={a:5,z:z} held=sharded culprit=a",
        "mesh=2 x=4x2:S(1) z=3:R state={app:stateful({w:x}),z:z} into={app:stateful({w:None}),z:z} culprit=app.w",
        "mesh=2 x=4:S(0) state={a:5} into={a:x} culprit=a",
    ),
}
REFUSED_SAVES = (
    "mesh=2 x=4:S(0) y=4:P(sum) state={x:x} into={x:x,y:y} culprit=artial",
    'mesh=2 x=4:S(0) y=3:R state={x:x} into={a:{b:x},"a.b":y} culprit=a.b',
    "mesh=2x2 x=4:S(0),R y=4x4:S(0),P(avg) state={x:x} into={y:y} culprit=artial",
)


def _state_draws(law: str, limits: Limits, *, stateful: bool = False) -> SearchStrategy[Case]:
    def fields(draw: st.DrawFn, names: list[str]) -> dict[str, object]:
        drawn = state_dicts(names, stateful=stateful).filter(_without_empty_dicts)
        return {"state": format_state(draw(drawn))}

    return trips(law, limits, tensors=2, plain=False, extra=fields)


def _without_empty_dicts(state: State) -> bool:
    """Whether no leaf has another name once the empty dicts are gone; a written case has one that does."""
    flat = flatten(state)
    return {*flatten(unflatten(flat))} == {*flat}


REFUSALS = {
    "missing": (
        "A load into a state with a key that the checkpoint has not is refused on all ranks, by name, and changes nothing.",
        "missing_dtensor_accepted",
    ),
    "size": ("A load into a tensor of another global shape is refused on all ranks, by name, and changes nothing.", "size_check_by_dims"),
    "kind": (
        "A load of a tensor into another value, or the other way round, is refused on all ranks, by name, and changes nothing.",
        "kind_check_skipped",
    ),
}


def _refused(variant: str) -> Law:
    clause, fault = REFUSALS[variant]
    return law_of(
        f"refuses[{variant}]",
        clause=clause,
        source=f"{DOCS}, DefaultLoadPlanner and LoadPlanner.create_local_plan",
        check=check_refused_load,
        holds=REFUSED_LOADS[variant][0],
        planted=fault,
        texts=REFUSED_LOADS[variant],
        sweeps=len(REFUSED_LOADS[variant]),
        stages=t.worlds,
        features=must_refuse,
        script=roundtrip_scripts.refused_load,
    )


def must_refuse(case: Case) -> set[str]:
    if "into" not in case:
        return {"must-refuse"}
    try:
        saved, into = flatten(parse_state(case.get("state"))), flatten(parse_state(case.get("into")))
    except FlattenError:
        return {"must-refuse"}
    crossed = any(isinstance(leaf, Slot) and name in saved and not isinstance(saved[name][1], Slot) for name, (_, leaf) in into.items())
    return {"must-refuse", "value-for-tensor"} if crossed else {"must-refuse"}


LAWS = (
    law_of(
        "kinds",
        clause="Every value of a nested state comes back in its place, equal and of its type, whatever stands beside it.",
        source=f"{LOAD}: non-tensor data is loaded and replaced in the state_dict; flatten_state_dict",
        holds="mesh=2 x=4:S(0) state={a:{n:5,w:x},b:1.5}",
        planted="numbers_at_the_top_dropped",
        texts=KINDS,
        sweeps=9,
        draw=lambda limits: _state_draws("roundtrip.kinds", limits),
        draws=10,
        weight=2.0,
        stages=t.worlds,
    ),
    law_of(
        "stateful",
        clause="An object with state_dict and load_state_dict is saved by the one and loaded by the other, once, with what was saved.",
        source=f"{LOAD}: for each Stateful object state_dict is called before, load_state_dict after the deserialization",
        check=check_stateful,
        holds="mesh=2 x=4:S(0) state={a:stateful({w:x,n:3})}",
        planted="stateful_not_told",
        texts=STATEFUL,
        sweeps=4,
        draw=lambda limits: _state_draws("roundtrip.stateful", limits, stateful=True),
        draws=2,
        stages=t.worlds,
    ),
    law_of(
        "subset",
        clause="A load fills what the destination names, ignores what else was saved, and in a partial load leaves alone what was not.",
        source=f"{DOCS}, DefaultLoadPlanner: allow_partial_load",
        check=check_subset,
        holds="mesh=2 x=5:S(0) y=3:R state={x:x,y:y} into={x:x}",
        planted="partial_load_clears",
        texts=SUBSET,
        sweeps=len(SUBSET),
        stages=t.worlds,
        script=lambda case: roundtrip_scripts.subset(case, *after_subset(t.read_trip(case))),
    ),
    *map(_refused, REFUSED_LOADS),
    law_of(
        "refuses[save]",
        clause="A state that no checkpoint can hold is refused on all ranks when it is saved; the checkpoint that was there still loads.",
        source=f"{DOCS}, save; flatten_state_dict: keys are paths joined by dots; torch.distributed.tensor docs, Partial",
        check=check_refused_save,
        holds=REFUSED_SAVES[1],
        planted="duplicate_names_accepted",
        texts=REFUSED_SAVES,
        sweeps=3,
        stages=t.worlds,
        features=must_refuse,
        script=roundtrip_scripts.refused_save,
    ),
)
