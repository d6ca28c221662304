"""The vocabulary every other package speaks: pure values and Protocols, no I/O."""
