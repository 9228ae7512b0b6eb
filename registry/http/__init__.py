"""The registry's HTTP API: who may ask is decided here, what happens is decided in the modules above."""
