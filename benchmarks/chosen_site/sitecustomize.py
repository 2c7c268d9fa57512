"""Read by every Python that ``benchmarks.chosen`` starts, ranks among them: notes of each case what it enters and what it costs."""

from benchmarks import case_notes

case_notes.install()
