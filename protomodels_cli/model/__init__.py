"""What is trained: the transformer, its cut into stages, the subspace method, the optimizers, the reference.

Knows the spec. Knows nothing of sockets, peers or the coordinator.
"""
