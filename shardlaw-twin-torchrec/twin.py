# departs first: tables.embedding_bags.on_one
#   tables.embedding_bags.on_one: its weight before the first step
#   on rank 0 16 elements differ, by up to 1.03, and may by 0: bound zero: these sums are exact
#     [0, 1] is -0.534516215, must be 0.5
#     [0, 5] is -0.254180133, must be 0.5
#     [0, 2] is -0.485437453, must be 0.25
#     [0, 6] is 0.59643656, must be 0
#   held as ranks: R
import sys

from shardlaw import twin

found = twin(
    "/opt/sl/wt/twin/examples/twins/torchrec_tables.py:make",
    options={"values_kept": "no"},
    sizes={"ranks": 2, "rows": 2, "width": 8, "batch": 2},
    values=("exact",),
    steps=1,
    seed=0,
    shrink=False,
)
print(*(found.departure.lines() if found.departure else ["it holds"]), sep="\n")
sys.exit(found.departs)
