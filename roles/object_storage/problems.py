"""What stands in the way of object storage. No sentence shows a key."""

from __future__ import annotations

import re
from typing import Any

Seen = dict[str, Any]


def problems(settings: Seen, node: Seen, nodes: Seen) -> list[str]:
    keys = [settings["access_key"], settings["secret_key"]]
    endpoint, region = settings["endpoint"], settings["region"]
    said = []
    if "" in keys:
        said.append("there is no key for object storage: put s3_access_key and s3_secret_key into the vault.")
    elif not all(re.fullmatch(r"\S+", key) for key in keys):
        said.append(
            "a key of object storage has no spaces and no line breaks: look at s3_access_key and s3_secret_key in "
            "the vault."
        )
    if endpoint and not re.fullmatch(r"https?://[^\s/]+/?", endpoint):
        said.append(
            f"object_storage_endpoint is {endpoint}: it has to be empty, or an address such as https://minio.lan:9000."
        )
    if not re.fullmatch(r"[a-z0-9-]*", region):
        said.append(f"object_storage_region is {region}: it has to be empty, or a word such as eu-west-1.")
    return said
