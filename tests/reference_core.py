"""How fast this machine is at present against a core of a stated speed, for bounds on the time of Python code.

Without it a bound would be one of the machine: what else a host does makes seconds of CPU time vary by half from minute to minute,
their ratio to those of other work of the same kind by a twentieth.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from hashlib import blake2b

REFERENCE_S = 0.08
"""CPU seconds that `reference_work` takes on the core that the bounds are for."""


def reference_work() -> None:
    """What the program does too, done by the standard library alone: rows parsed, hashed, remembered and written."""
    rows = {}
    for index in range(10_000):
        row = json.loads(f'{{"id":"row-{index}","prompt":"Say {index}","max_tokens":2}}')
        rows[row["id"]] = blake2b(row["prompt"].encode(), digest_size=8).hexdigest()
        json.dumps({"index": index, "id": row["id"], "text": row["prompt"]}, separators=(",", ":"))


def reference_s() -> float:
    """CPU seconds of `reference_work` now."""
    began_s = time.process_time()
    reference_work()
    return time.process_time() - began_s


def slowness(seconds: Sequence[float]) -> float:
    """How many times longer than that core this one took while `reference_s` gave these, at least 1."""
    return max(sum(seconds) / len(seconds) / REFERENCE_S, 1.0)
