"""Functions that take a network and return a network."""
