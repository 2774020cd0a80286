"""Experiments on top of the public pieces: each a function that returns plain numbers, and a plot of them."""
