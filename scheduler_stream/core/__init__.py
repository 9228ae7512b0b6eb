"""What the scheduler decides, as values: state in, changes and outputs out. No clock, no randomness, no I/O."""
