"""Runs on this machine as real processes, and faults injected into them: what the demo and the benchmarks run on."""
