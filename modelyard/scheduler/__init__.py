"""Which request runs where, and which models are loaded."""
