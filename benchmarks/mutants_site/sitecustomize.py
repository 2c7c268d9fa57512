"""Read by every Python that ``benchmarks.mutants`` starts, ranks among them: plants a change of torch's source."""

from benchmarks import mutants

mutants.install()
