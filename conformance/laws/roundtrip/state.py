"""Laws on the contents of states: values of every kind, stateful objects, partial loads, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Of, caught
from shardlaw.conformance.law.fields import Folder, Rank, Word
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.checkpoint.calls import App, first_line, load, save
from shardlaw.conformance.laws.checkpoint.contents import Contents
from shardlaw.conformance.laws.checkpoint.fields import (
    Destination,
    PlannerField,
    Reader,
    Saved,
    SavePlanner,
    StateField,
    Writer,
)
from shardlaw.conformance.laws.roundtrip.cases import (
    DOCS,
    after_save,
    due_refusal,
    due_source,
    round_trip,
    trip_law,
    trips,
)
from shardlaw.reference.checkpoint.state_dict import (
    FlattenError,
    Path,
    Slot,
    State,
    Stateful,
    flatten,
    format_state,
    parse_state,
    spoil,
    unflatten,
)
from shardlaw.strategies.state_dicts import state_dicts

LOAD = f"{DOCS}, load"


KINDS = (
    "mesh=2 x=4:S(0) "
    'state={a:{n:5,w:x},b:b"ab",c:"text",d:None,e:1.5,f:True,g:[1,2.0,"x"],h:(1,(2,None)),i:[],j:{},k:{1,2},l:7}',
    "mesh=2 mesh.load=3 x=5x2:S(0) y=3:R:int64 "
    'state={opt:{state:{w:{step:y,m:x}},groups:[{lr:0.1,names:["w"]},{lr:0.2,names:["b"]}]}}',
    "mesh=2 mesh.load=1 x=4:- y=3:S(0):bool state={l:[x,y,3],n:[[x],[1,2]],t:(x,1),u:[(x,),{q:1}]} to.y=R",
    'mesh=2 x=3:R state={"a.b":x,a:{c:1},"1":2,d:{"e.f":{g:x,h:"v"}},Z:0,_:b""}',
    "mesh=3 mesh.load=2 x=7:S(0) y=2x2:R:float64 state={m:{a:{b:{c:x}},d:{e:y}},n:-3,s:{x:1,y:None}}",
    "mesh=1 mesh.load=2 x=4:S(0) state={a:x,b:x,c:[x,[x,5]],z:1+2j}",
    "mesh=2 x=4:S(0) y=3:R state={o:{0:{m:x},1:{m:y}}}",
    "mesh=2 x=4:S(0) state={o:{0:{m:x,step:3}}}",
    "mesh=2 x=4:S(0) state={x:x,u:[1,{}]}",
)
# a checkpoint stores keys as texts; a tensor is loaded in place, so its key keeps its type
KEYS = (
    "mesh=2 x=4:S(0) y=3:R state={o:{3:{m:x},True:{m:y},None:x,(0,1):y,0.5:[x]}}",
    "mesh=2 mesh.load=3 x=5x2:S(0) y=7:R state={o:{-1:x,False:y,None:{w:x},(2,):{w:y},1.5:x}} to.x=S(1) to.y=S(0)",
    "mesh=3 mesh.load=1 x=7:S(0):int64 y=4:- state={o:{True:x,2:y,None:x,():y,0.25:{w:x}}} to.x=R",
    "mesh=2x2 mesh.load=2 x=5x4:S(0),S(1) y=3:R,R to.x=S(0) to.y=R "
    "state={a:[{0:x},{False:y},{None:y},{(1,(2,3)):x},{2.0:y}]}",
    'mesh=2 x=0x3:S(0) y=():R state={o:{7:{8:x},True:{False:y},None:{None:x},("a","b"):{1:y},-0.5:{1e30:x,1.0:y}}}',
    "mesh=1 mesh.load=2 x=4:S(0):bool y=6:S(0) state={a:{0:{p:x},True:{p:y}},b:{None:x,(None,True):y,0.125:x,5:y}}",
    "mesh=2@0,2 mesh.load=2 x=5:S(0) y=3:S(0) state={o:{10:x,9:y,False:[x],None:[y],(1,):[[x]],3.5:[{w:y}]}}",
    "mesh=2 x=4:S(0) state={o:{0:x,True:2,None:x,(0,):x,2.5:x}}",
    'mesh=2 x=4:S(0) state={o:{2:x,True:x,None:"a",(x,y):x,2.5:x}}',
    "mesh=2 mesh.load=1 x=4:S(0) state={o:{4:x,False:x,None:x,(0,1):{step:3,m:x},0.5:x}} to.x=R",
    "mesh=2 x=4:S(0) state={o:{True:x,6:x,None:x,(0,1):x,0.5:1.5}}",
    "mesh=3 x=7x2:S(0) y=5:R state={o:{5:x,False:{m:y},None:{w:x},(3,):y,4.5:x}}",
    "mesh=2 mesh.load=1 x=5:S(0):int32 y=2x3:- state={a:{b:{1:y,True:x}},c:{None:x,(1,2,3):{w:y},-2.5:y}} to.x=R",
    "mesh=1 mesh.load=3 x=6x2:R y=4:R:bool state={o:[{12:x},{False:x},{None:y},{(0,):y},{8.5:x}]} to.x=S(0) to.y=R",
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
    "mesh=2 x=5:S(0) state={x:x,d:{n:1,o:{m:None}}} into={x:x}",
    'mesh=2 x=4:S(0) y=3:R state={x:x,u:[1,2],n:(1,),d:{p:None}} into={x:x,u:[],n:"text",d:{p:5,q:y}}',
    "mesh=2 x=5:S(0) y=3:R state={x:x} into={x:x,y:y} nested=kept",
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


def state_cases(limits: Limits, *, stateful: bool = False) -> SearchStrategy[Case]:
    """Cases with a state of up to two tensors."""

    def draw_state(draw: st.DrawFn, names: list[str]) -> dict[str, object]:
        return {"state": format_state(draw(state_dicts(names, stateful=stateful).filter(_keeps_names)))}

    return trips(limits, tensors=2, plain=False, extra=draw_state)


def _keeps_names(state: State) -> bool:
    """Whether all leaves have the same names without empty dicts; :data:`KINDS` has a state where they have not."""
    flat = flatten(state)
    return {*flatten(unflatten(flat))} == {*flat}


@after_save(
    "stateful",
    source=f"{LOAD}: for each Stateful object state_dict is called before, load_state_dict after the deserialization",
    control="mesh=2 x=4:S(0) state={a:stateful({w:x,n:3})}",
    texts=STATEFUL,
    draw=lambda limits: state_cases(limits, stateful=True),
    draws=2,
)
def stateful(state: Destination, reader: Reader, folder: Folder):
    """A stateful object is saved through state_dict, and loaded through one call of load_state_dict with the saved
    state."""
    apps = {key: value for key, value in state.items() if isinstance(value, App)}
    load(state, reader(folder))
    others = [key for key, app in apps.items() if state[key] is not app]
    return {"loaded": state, "other objects": others, "calls": {key: app.loads for key, app in apps.items()}}


@stateful.due
def _(state: Contents):
    apps = [key for key, value in state.tree.items() if isinstance(value, Stateful)]
    return {"loaded": state, "other objects": Of([]), "calls": Of(dict.fromkeys(apps, 1))}


@after_save(
    "subset",
    source=f"{DOCS}, DefaultLoadPlanner: allow_partial_load",
    control="mesh=2 x=5:S(0) y=3:R state={x:x,y:y} into={x:x}",
    texts=SUBSET,
)
def subset(
    state: Destination,
    full: Annotated[dict[str, Any], StateField("load", tree="save", fill="poison")],
    reader: Reader,
    planner: Annotated[Any, PlannerField(saves=False, partial=True)],
    folder: Folder,
):
    """A load fills the keys of the destination and ignores other saved keys; a partial load does not change keys that
    were not saved; a second load gets all."""
    return {"loaded": load(state, reader(folder), planner), "whole": load(full, reader(folder))}


@subset.due
def _(state: Contents, full):
    saved, into = flatten(state.trip.save.state), flatten(state.tree)
    unchanged = {path: leaf for name, (path, leaf) in into.items() if name not in saved}
    values = {path: spoil(leaf) for path, leaf in unchanged.items()}
    for name, (path, leaf) in into.items():  # a saved value takes the place of any value, a tensor is filled
        if name in saved and not isinstance(leaf, Slot):
            values[path] = saved[name][1]
    tensors = [leaf.name for leaf in unchanged.values() if isinstance(leaf, Slot)]
    return {"loaded": state.with_tree(replace_at(state.tree, values), tensors), "whole": full}


def replace_at(state: State, values: Mapping[Path, object]) -> State:
    """``state`` with these values at their paths."""

    def visit(path: Path, value: object) -> object:
        if path in values:
            return values[path]
        if isinstance(value, Stateful):
            return Stateful({key: visit((*path, str(key)), entry) for key, entry in value.state.items()})
        if isinstance(value, dict):
            return {key: visit((*path, str(key)), entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [visit((*path, at), entry) for at, entry in enumerate(value)]
        return value

    return {key: visit((key,), value) for key, value in state.items()}


def refusal_features(case: Case) -> set[str]:
    try:
        saved, into = flatten(parse_state(case.get("state"))), flatten(parse_state(case.get("into")))
    except FlattenError:
        return {"must-refuse"}
    is_value_for_tensor = any(
        isinstance(leaf, Slot) and name in saved and not isinstance(saved[name][1], Slot)
        for name, (_, leaf) in into.items()
    )
    return {"must-refuse", "value-for-tensor"} if is_value_for_tensor else {"must-refuse"}


def refused_load(state: Destination, reader: Reader, culprit: Word, folder: Folder):
    """A load that cannot be right is refused by all ranks with an error that names the culprit, and changes nothing."""
    refused = caught(lambda: load(state, reader(folder)))
    return {"load": refused, "load message": culprit in first_line(refused), "kept": state}


def refusal_law(variant: str, clause: str) -> Law:
    law = after_save(
        f"refuses[{variant}]",
        clause=clause,
        source=f"{DOCS}, DefaultLoadPlanner and LoadPlanner.create_local_plan",
        control=REFUSED_LOADS[variant][0],
        texts=REFUSED_LOADS[variant],
        features=refusal_features,
    )(refused_load)
    law.due(lambda state, culprit: {**due_refusal("load", culprit), "kept": state.before_load()})
    return law


@trip_law(
    "refuses[save]",
    source=f"{DOCS}, save; flatten_state_dict: keys are paths joined by dots; torch.distributed.tensor docs, Partial",
    control=REFUSED_SAVES[1],
    texts=REFUSED_SAVES,
    features=refusal_features,
)
def refused_save(
    state: Saved,
    bad: Annotated[dict[str, Any], StateField("save", tree="load")],
    writer: Writer,
    culprit: Word,
    folder: Folder,
):
    """A save of a state that a checkpoint cannot store is refused on all ranks; the checkpoint there still loads."""
    save(state, writer(folder))
    refused = caught(lambda: save(bad, writer(folder)))
    return {"save": refused, "save message": culprit in first_line(refused)}


@refused_save.due
def _(culprit):
    return due_refusal("save", culprit)


@refused_save.then
def _(state: Annotated[dict[str, Any], StateField("save", fill="poison")], reader: Reader, folder: Folder):
    return {"kept": load(state, reader(folder))}


@refused_save.due
def _(state):
    return {"kept": state}


BY_RANK = (
    "mesh=2 x=5:S(0) a=3:R",
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R to.x=S(1) to.a=S(0)",
    "mesh=3 mesh.load=2 x=7:S(0):int64 a=3:- to.x=R",
    "mesh=2 x=5:S(0) a=3:R dedup=lowest",
    "mesh=3 mesh.load=1 x=7:S(0) a=4:R to.x=R dedup=lowest",
    "mesh=2x2 mesh.load=2 x=5x6:S(0),S(1) a=5:R,S(0) to.x=S(0) to.a=R",
    "mesh=2 mesh.load=2x2 x=0x3:S(0) a=():R to.x=R,S(0) to.a=R,R threads=2",
    "mesh=2@0,2 mesh.load=2 x=5:S(0) a=3:S(0) files=item",
    "mesh=1 mesh.load=3 x=5:S(0) a=3:R",
    "mesh=2x2 mesh.load=3 x=4:S(0),S(0) a=3:R,R to.x=S(0) to.a=R dedup=lowest threads=2",
)


@trip_law(
    "by-rank",
    source=f"{DOCS}, save: each rank saves what it has; DefaultSavePlanner: dedup_save_to_lowest_rank",
    control=BY_RANK[0],
    texts=BY_RANK,
)
def by_rank(state: Saved, rank: Rank, writer: Writer, planner: SavePlanner, folder: Folder):
    """All ranks load a key that one rank saved; of values that differ by rank they load one, with dedup=lowest that of
    the lowest rank."""
    save({**state, "shared": [rank, "v"], f"own{rank}": (rank, rank + 1)}, writer(folder), planner)
    return {"source": state}


by_rank.due(due_source)


@by_rank.then
def _(state: Destination, reader: Reader, folder: Folder):
    names = sorted(name for name in reader(folder).read_metadata().state_dict_metadata if name.startswith("own"))
    loaded = load({**state, "shared": None, **dict.fromkeys(names)}, reader(folder))
    return {"loaded": state, "own": {name: loaded[name] for name in names}, "shared": loaded["shared"]}


@by_rank.due
def _(state: Contents, dedup: str = ""):
    ranks = range(state.trip.world_sizes[0])
    writers = ranks[:1] if dedup == "lowest" else ranks
    return {
        "loaded": state,
        "own": Of({f"own{rank}": (rank, rank + 1) for rank in ranks}),
        "shared": Either(tuple(Of([rank, "v"]) for rank in writers)),
    }


LAWS = (
    round_trip(
        "kinds",
        clause="A load gives every value of a nested state, at its key, equal and of its type.",
        source=f"{LOAD}: non-tensor data is loaded and replaced in the state_dict; flatten_state_dict",
        control="mesh=2 x=4:S(0) state={a:{n:5,w:x},b:1.5}",
        texts=(*KINDS, *KEYS),
        draw=state_cases,
        draws=10,
        weight=2.0,
    ),
    refusal_law(
        "missing",
        "A load of a key that the checkpoint lacks is refused on all ranks, by name, and changes nothing.",
    ),
    refusal_law(
        "size", "A load into a tensor of another global shape is refused on all ranks, by name, and changes nothing."
    ),
    refusal_law(
        "kind",
        "A load of a tensor into another value, or of a value into a tensor, is refused on all ranks, by name, and "
        "changes nothing.",
    ),
)
