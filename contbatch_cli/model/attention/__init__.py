"""Attention backends: one file each, one signature."""
