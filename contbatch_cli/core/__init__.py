"""Scheduling and KV memory as pure integers: standard library only, no torch, no clock, no randomness, no I/O."""
