"""Laws on engines that run the same program: processes that are ranks, and one process that acts for all of them."""
