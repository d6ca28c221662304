"""`modelyard bench`: workloads, a load generator, statistics and reports, which the optimizer and `bench/` use too."""
