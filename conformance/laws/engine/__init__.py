"""Laws of engines that run SPMD programs without one process for each rank."""
