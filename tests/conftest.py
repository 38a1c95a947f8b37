"""Settings that have to stand before any test module is imported."""

from __future__ import annotations

import os

if not os.path.exists("/dev/nvidiactl"):
    # No GPU: Triton's kernels run in its interpreter, which has to be asked for before anything imports Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")
