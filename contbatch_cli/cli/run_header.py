"""What a run or a rehearsal starts with: its resolved values, for the trace's header and for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from contbatch_cli.build import Job
from contbatch_cli.trace import header_line


def resolved_config(job: Job) -> dict[str, Any]:
    """The config with every `auto` of scheduler and cache replaced by what it came to."""
    config = asdict(job.config)
    config["scheduler"] |= {
        "token_budget": job.sizes.token_budget,
        "max_batch_size": job.sizes.max_batch_size,
        "job_order": job.order.value,
    }
    config["cache"] |= {"block_size": job.sizes.block_size, "num_blocks": job.sizes.num_blocks}
    return config


def trace_header(job: Job, device: dict[str, Any]) -> str:
    """The trace's first line. `rows` is known when the inputs end within the look-ahead window."""
    return header_line(resolved_config(job), device, job.rows.total_rows, rehearsable=not job.rows.is_live)


def sizes_text(job: Job) -> tuple[str, ...]:
    """One line a resolved value, with its reason."""
    sizes = job.sizes
    values: dict[str, int | str] = {
        "scheduler.token_budget": sizes.token_budget,
        "scheduler.max_batch_size": sizes.max_batch_size,
        "cache.num_blocks": sizes.num_blocks,
    }
    lines = [f"{key} {value:,} ({sizes.reasons[key]})" for key, value in values.items() if key in sizes.reasons]
    return (*lines, f"cache.block_size {sizes.block_size}", f"scheduler.job_order {job.order.value} ({job.order.reason})")
