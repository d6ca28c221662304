"""Scripts that install what tests and benchmarks need: agents, frameworks, browsers, servers."""
