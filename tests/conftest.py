"""Settings for all tests."""

import os
import signal

from hypothesis import settings

# A shared or slow machine must not turn a passing example into a failure; examples are the same in every run.
settings.register_profile("contbatch", deadline=None, derandomize=True)
settings.load_profile("contbatch")

# A shell that starts the tests in the background has these ignored, and what ignores them hands that down to what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

if not os.path.exists("/dev/nvidiactl"):
    # No GPU: Triton's kernels run in its interpreter, which has to be asked for before anything imports Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")
