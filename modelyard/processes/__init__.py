"""Child processes, their supervision, and the ports they share."""
