"""Read by every Python that ``benchmarks.reach`` starts, ranks among them: notes what is entered of torch's source."""

from benchmarks import reach

reach.install()
