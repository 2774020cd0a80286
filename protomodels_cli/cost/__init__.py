"""The cost model: what a run needs in memory, bytes and time, from its spec alone. Pure arithmetic, no torch."""
