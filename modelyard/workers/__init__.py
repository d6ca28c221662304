"""Engines in other processes and on other machines, and the link to the scheduler that places them."""
