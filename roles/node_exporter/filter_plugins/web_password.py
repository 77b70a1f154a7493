"""A password as node_exporter's configuration wants it."""

from __future__ import annotations

import base64
import hashlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import crypt  # the controller's Python is 3.11


def web_password(password: str, node: str) -> str:
    """bcrypt of the password, with a salt that is the node's own and always the same: nothing differs next time.

    Nothing of the password is in it: who sees the hash would try guesses on the salt, which costs nearly nothing.
    """
    digest = hashlib.sha256(f"{node}\0aura-node-exporter".encode()).digest()[:16]
    salt = base64.b64encode(digest, altchars=b"./").decode().rstrip("=")
    return crypt.crypt(password, f"$2b$10${salt}")


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"web_password": web_password}
