"""Settings for all tests."""

import os

from hypothesis import settings

# A shared or slow machine must not turn a passing example into a failure; examples are the same in every run.
settings.register_profile("contbatch", deadline=None, derandomize=True)
settings.load_profile("contbatch")

if not os.path.exists("/dev/nvidiactl"):
    # No GPU: Triton's kernels run in its interpreter, which has to be asked for before anything imports Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")
