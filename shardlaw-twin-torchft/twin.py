# departs first: embed
#   mix: its output 0 in step 1
#   on rank 1 2 elements differ, by up to 0.312, and may by 0: bound zero: these sums are exact
#     [0, 0, 1] is -0.25, must be -0.5625
#     [0, 0, 0] is 0.25, must be 0.3125
#   held as tp: R
#   before it, embed: its output 0 in step 1 is whole only as a sum over ranks (tp: P(sum))
#   the op behind it: aten.embedding.default#0, off by 1, bound 0
import sys

from shardlaw import twin

found = twin(
    "/opt/sl/wt/twin/examples/twins/torchft_groups.py:make",
    options={"group": "dummy"},
    sizes={"tp": 2, "vocab": 3, "width": 2, "batch": 1, "seq": 1},
    values=("exact",),
    steps=1,
    seed=0,
    shrink=False,
)
print(*(found.departure.lines() if found.departure else ["it holds"]), sep="\n")
sys.exit(found.departs)
