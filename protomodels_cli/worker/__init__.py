"""The program that a peer runs: one stage, its two neighbours, and the coordinator's word."""
