"""Model files on this machine: finding them, fetching them once, and remembering which are ours."""
