"""The optimizer: measures a model's settings on this machine, explains what it found, and writes the best back."""
