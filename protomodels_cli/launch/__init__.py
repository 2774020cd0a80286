"""Runs on this machine as real processes, and trouble for them: what the demo and the benchmarks run on."""
