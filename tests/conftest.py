"""Settings for all tests."""

from hypothesis import settings

# A shared or slow machine must not turn a passing example into a failure; examples are the same in every run.
settings.register_profile("contbatch", deadline=None, derandomize=True)
settings.load_profile("contbatch")
