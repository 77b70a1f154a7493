"""What stands in the way of copies of runs."""

from __future__ import annotations

import re
from typing import Any

from ansible.plugins.loader import filter_loader

Seen = dict[str, Any]


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    directory, mount, bucket = (settings[name] for name in ("directory", "mount", "bucket"))
    misplaced = filter_loader.get("misplaced").j2_function(directory, "run_copies_directory")
    said = [misplaced] if misplaced else []
    if mount and not misplaced and not directory.startswith(f"{mount}/"):
        said.append(
            f"run_copies_directory is {directory}, which is not below {mount}, where the shared directory is mounted."
        )
    if bucket and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]+/[A-Za-z0-9._/-]+", bucket):
        said.append(f"run_copies_bucket is {bucket}: it has to be like s3://bucket/directory.")
    if min(settings[name] for name in ("keep", "rate", "leave_free")) < 0:
        said.append("run_copies_keep, run_copies_rate and run_copies_leave_free cannot be negative.")
    return said
