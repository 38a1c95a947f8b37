"""contbatch: offline batch generation with continuous batching."""

__version__ = "0.1.0"
