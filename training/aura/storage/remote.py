"""Files in S3, Cloudflare R2, MinIO or behind a web server, read through fsspec; what goes wrong is one sentence.

Who one is, and where, is read by botocore, as for every other program: AWS_PROFILE, ~/.aws/config (endpoint_url,
region), ~/.aws/credentials, AWS_… A service of systemd has its keys in $CREDENTIALS_DIRECTORY/s3, in the form of
~/.aws/credentials. No sentence shows a key: of what a server answers, only the status and the code are taken.

fsspec and s3fs take a second to import, so they are imported when an address is opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aura.errors import EXIT_TEMPORARY, AuraError, ConfigError
from aura.storage.address import Address

if TYPE_CHECKING:
    import fsspec

CREDENTIALS = "s3"
RETRIES = 3  # of s3fs, for a connection that broke; botocore tries again by itself, AWS_MAX_ATTEMPTS times
TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60}  # seconds


class Refused(ConfigError):
    """The server, or what is known of it, says no: trying again does not help."""


class Unreachable(AuraError):
    """Nobody answers, or not as a server should: trying again later may help."""

    exit_code = EXIT_TEMPORARY


class Remote:
    """What lies below an address. Everything raises Refused and Unreachable."""

    def __init__(self, address: Address) -> None:
        """Nothing is asked yet."""
        self.address = address
        with self._in_words():
            self.files = _file_system(address)

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None where there is none."""
        with self._in_words():
            try:
                return bytes(self.files.cat_file(str(self.address / name)))
            except FileNotFoundError as error:
                if _code(error) == "NoSuchBucket":
                    raise
                return None

    def directories_with(self, name: str) -> list[str]:
        """Which directories below hold a file of this name; a web server need not say."""
        with self._in_words():
            return sorted(path.split("/")[-2] for path in self.files.glob(f"{self.address}/*/{name}"))

    def download(self, name: str, path: Path, passed: Callable[[int], None]) -> None:
        """Into a file, which is written anew; `passed` hears how many bytes have come. Raises OSError for the file. Who
        needs to know whether all bytes are right compares a checksum."""
        from fsspec.callbacks import Callback

        class Count(Callback):  # type: ignore[misc]  # fsspec has no types
            def relative_update(self, inc: int = 1) -> None:
                passed(inc)

        with self._in_words():
            self.files.get_file(str(self.address / name), str(path), callback=Count())

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """What the libraries raise, as a sentence; OSErrors of this machine's own files stay what they are."""
        from aiohttp import ClientError, ClientResponseError
        from botocore import exceptions as boto
        from botocore.parsers import ResponseParserError

        where = {"address": self.address}
        broken = (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError, ResponseParserError)
        try:
            yield
        except (boto.NoCredentialsError, boto.PartialCredentialsError):
            raise Refused("storage_without_key", **where) from None
        except ClientResponseError as error:
            if error.status in (401, 403):
                raise Refused("storage_refuses", **where, code=error.status) from None
            raise Unreachable("storage_unreachable", **where, reason=error.status) from None
        except (*broken, ClientError) as error:
            raise Unreachable("storage_unreachable", **where, reason=type(error).__name__) from None
        except (boto.BotoCoreError, ValueError) as error:  # a profile or an endpoint that is none
            raise Refused("storage_settings_wrong", **where, reason=error) from None
        except OSError as error:
            code = "TimeoutError" if isinstance(error, TimeoutError) else _code(error)
            if not code:
                raise
            if code == "NoSuchBucket":
                bucket = str(self.address).split("/")[2]
                raise Refused("no_such_bucket", **where, bucket=bucket) from None
            if isinstance(error, PermissionError):
                raise Refused("storage_refuses", **where, code=code) from None
            raise Unreachable("storage_unreachable", **where, reason=code) from None


def _file_system(address: Address) -> fsspec.AbstractFileSystem:
    import fsspec

    protocol = str(address).partition(":")[0]
    if protocol != "s3":
        return fsspec.filesystem(protocol)
    from aiobotocore.session import AioSession

    session = AioSession()
    credentials = Path(os.environ.get("CREDENTIALS_DIRECTORY", ""), CREDENTIALS)
    if "CREDENTIALS_DIRECTORY" in os.environ and credentials.exists():
        session.set_config_variable("credentials_file", str(credentials))
    connection = fsspec.filesystem(
        "s3", session=session, config_kwargs=TIMEOUTS, use_listings_cache=False, skip_instance_cache=True
    )
    connection.retries = RETRIES
    connection.connect()
    return connection


def _code(error: OSError) -> Any:
    """What an S3 server has said, such as 'SignatureDoesNotMatch' or '500'; '' where it was none."""
    from botocore.exceptions import ClientError

    cause = error.__cause__
    return cause.response["Error"].get("Code", "?") if isinstance(cause, ClientError) else ""
