"""The program that owns a run: who is in it, what comes next, and the one public port."""
