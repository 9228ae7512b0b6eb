"""The registry's rules as values: fences, checkpoints, projections. No I/O, no clock, no randomness."""
