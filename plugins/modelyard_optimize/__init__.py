"""`modelyard optimize`: measures a model's settings on this machine, reports the best, and writes them to the file."""
