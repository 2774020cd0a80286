"""Benchmarks: real runs on this machine, measured as ratios within one command."""
