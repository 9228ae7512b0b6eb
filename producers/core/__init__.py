"""From the outside world to commands, as values: documents, submissions, signatures, requests, and the view of jobs. No I/O, no clock, no randomness."""
