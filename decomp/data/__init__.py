"""Where batches come from: ``batch(step)`` is a pure function of (seed, step) (SPEC R3, R4)."""
