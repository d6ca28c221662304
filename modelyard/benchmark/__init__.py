"""`modelyard bench`: workloads, the load generator, statistics and reports; also used by the optimizer and bench/."""
