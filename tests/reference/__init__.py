"""The method of SPEC.md in plain numpy float64, written from the SPEC alone; it imports neither jax nor decomp.

Per-site dictionaries and loops, no stacks, no sharding, no randomness: draws are injected by the caller.
"""
