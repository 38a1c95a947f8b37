"""A test-only program: the product's own command line, its replicas with the scripted runner.

python -m tests.cluster.scripted generate --replicas 2 ...
"""

from __future__ import annotations

import sys

from contbatch_cli import build, build_replicas
from tests.cli.scripted import build_scripted_executor
from tests.cluster.scripted_replica import ScriptedReplicaBuilder


def main() -> None:
    build.build_executor = build_scripted_executor
    build_replicas.ModelReplicaBuilder = ScriptedReplicaBuilder  # type: ignore[misc]
    from contbatch_cli.cli.app import main as contbatch

    try:
        contbatch()
    finally:
        assert "torch" not in sys.modules, "torch was imported"


if __name__ == "__main__":
    main()
