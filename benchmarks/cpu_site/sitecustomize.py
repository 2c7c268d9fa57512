"""Read by every Python that ``benchmarks.cpu`` starts, ranks among them: notes a hundred times a CPU-second what it is at."""

from benchmarks import cpu

cpu.install()
