"""Whether the shared directory, where it is mounted, shall be mounted elsewhere or in another way (role nfs)."""

from __future__ import annotations

SMB, NFS = 445, 2049  # ports


def mount_moves(service: str, directory: str, source: str) -> bool:
    """service: the text of the unit that looks after the mount now; '' where there is none."""
    port = SMB if source.startswith("//") else NFS
    return service != "" and not (f" {directory} " in service and f" {port}\n" in service)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"mount_moves": mount_moves}
