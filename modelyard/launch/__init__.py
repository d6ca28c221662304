"""`modelyard launch`: a coding agent in the user's terminal, on a local model, with its own settings left alone."""
