"""Objects in S3, Cloudflare R2 or MinIO, through s3fs; what goes wrong is one sentence.

Who one is, and where, is read by botocore, as for every other program: AWS_PROFILE, ~/.aws/config (endpoint_url,
region), ~/.aws/credentials, AWS_… A service of systemd has its keys in $CREDENTIALS_DIRECTORY/s3, in the form of
~/.aws/credentials. No sentence shows a key: of what a server answers, only the status and the code are taken.

s3fs takes a second to import, so it is imported when a bucket is opened: who names no s3:// needs none of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from aura.errors import EXIT_TEMPORARY, AuraError, ConfigError
from aura.storage.address import Address

if TYPE_CHECKING:
    import s3fs

PART = 16 << 20  # bytes of an object that are sent at once, and held in memory
CREDENTIALS = "s3"
RETRIES = 3  # of s3fs, for a connection that broke; botocore tries again by itself, AWS_MAX_ATTEMPTS times
TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60}  # seconds
CHECKSUM = "sha256"  # of the content, in the metadata of an object


class Refused(ConfigError):
    """The server, or what is known of it, says no: trying again does not help."""


class Unreachable(AuraError):
    """Nobody answers, or not as a server should: trying again later may help."""

    exit_code = EXIT_TEMPORARY


@dataclass(frozen=True)
class Entry:
    """One object of a listing."""

    size: int
    changed: datetime  # when it was written, by the server's clock
    etag: str


def nothing(count: int) -> None:
    """Nobody counts the bytes."""


class Bucket:
    """Everything raises Refused and Unreachable."""

    def __init__(self, address: Address) -> None:
        """Any address in it: sentences name it. Nothing is asked yet."""
        self.address = address
        with self._in_words():
            self.fs = _connection()

    def read(self, address: Address) -> bytes | None:
        """The content of a small object; None where there is none."""
        with self._in_words():
            try:
                return self.fs.cat_file(_path(address))
            except FileNotFoundError as error:
                if _code(error) == "NoSuchBucket":
                    raise
                return None

    def entries(self, address: Address) -> dict[str, Entry]:
        """What lies below, by the name behind `address`/."""
        start = f"{_path(address)}/"
        with self._in_words():
            try:
                found = self.fs.find(start, detail=True)
            except FileNotFoundError as error:
                if _code(error) == "NoSuchBucket":
                    raise
                return {}
        return {
            name.removeprefix(start): Entry(entry["size"], entry["LastModified"], entry["ETag"].strip('"'))
            for name, entry in found.items()
            if entry["type"] == "file" and name.startswith(start)
        }

    def holds(self, address: Address, size: int, sha256: str) -> bool:
        """Is the object there, with this size, and was it sent with this checksum?"""
        with self._in_words():
            try:
                head = self._ask("head_object", address)
            except FileNotFoundError:
                return False
        return bool(head["ContentLength"] == size and head["Metadata"].get(CHECKSUM) == sha256)

    def write(self, address: Address, content: bytes) -> None:
        """A small object. It is there whole, or as it was before."""
        metadata = {CHECKSUM: hashlib.sha256(content).hexdigest()}
        with self._in_words():
            self._ask("put_object", address, Body=content, Metadata=metadata)

    def upload(
        self, path: Path, address: Address, sha256: str, passed: Callable[[int], None] = nothing
    ) -> bool:
        """Whether the file had this checksum. If not, nothing has become of the object, and neither when this breaks
        off. `passed` hears how many bytes have gone, and may wait. Raises OSError for the file."""
        with path.open("rb") as source, self._in_words():
            if path.stat().st_size <= PART:
                return self._upload_at_once(source.read(), address, sha256, passed)
            return self._upload_in_parts(source, address, sha256, passed)

    def _upload_at_once(
        self, content: bytes, address: Address, sha256: str, passed: Callable[[int], None]
    ) -> bool:
        if hashlib.sha256(content).hexdigest() != sha256:
            return False
        self._ask("put_object", address, Body=content, Metadata={CHECKSUM: sha256})
        passed(len(content))
        return True

    def _upload_in_parts(
        self, source: IO[bytes], address: Address, sha256: str, passed: Callable[[int], None]
    ) -> bool:
        self._abort_uploads(address)
        upload = self._ask("create_multipart_upload", address, Metadata={CHECKSUM: sha256})["UploadId"]
        digest = hashlib.sha256()
        parts: list[dict[str, Any]] = []
        try:
            while chunk := source.read(PART):
                digest.update(chunk)
                number = len(parts) + 1
                answer = self._ask("upload_part", address, UploadId=upload, PartNumber=number, Body=chunk)
                parts.append({"PartNumber": number, "ETag": answer["ETag"]})
                # The memory is needed for the corpus that is trained on.
                os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                passed(len(chunk))
            if digest.hexdigest() == sha256:
                self._ask(
                    "complete_multipart_upload", address, UploadId=upload, MultipartUpload={"Parts": parts}
                )
                return True
        except BaseException:
            with suppress(Exception):  # what has broken off above is what there is to say
                self._ask("abort_multipart_upload", address, UploadId=upload)
            raise
        self._ask("abort_multipart_upload", address, UploadId=upload)
        return False

    def _abort_uploads(self, address: Address) -> None:
        """What was sent of this object by somebody who was killed costs money, and no listing shows it."""
        try:
            found = self.fs.call_s3("list_multipart_uploads", Bucket=address.bucket, Prefix=address.key)
        except OSError:
            return  # a right of its own, which a key for reading and writing need not have
        for upload in found.get("Uploads", []):
            if upload["Key"] == address.key:
                self._ask("abort_multipart_upload", address, UploadId=upload["UploadId"])

    def download(self, address: Address, path: Path, passed: Callable[[int], None] = nothing) -> None:
        """Into a file, which is written anew; a connection that breaks is taken up where it was. Raises OSError for the
        file. Who needs to know whether all bytes are right compares a checksum."""
        from fsspec.callbacks import Callback

        class Count(Callback):  # type: ignore[misc]  # fsspec has no types
            def relative_update(self, inc: int = 1) -> None:
                passed(inc)

        with self._in_words():
            self.fs.get_file(_path(address), str(path), callback=Count(), max_concurrency=1)

    def remove(self, addresses: list[Address]) -> None:
        """In this order, one after another. What is not there any more is no error."""
        with self._in_words():
            for address in addresses:
                self._ask("delete_object", address)

    def _ask(self, method: str, address: Address, **values: Any) -> dict[str, Any]:
        return self.fs.call_s3(method, Bucket=address.bucket, Key=address.key, **values)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """What the libraries raise, as a sentence; OSErrors of this machine's own files stay what they are."""
        from aiohttp import ClientError as Broken
        from botocore import exceptions as boto
        from botocore.parsers import ResponseParserError

        where = {"address": self.address}
        try:
            yield
        except (boto.NoCredentialsError, boto.PartialCredentialsError):
            raise Refused("storage_without_key", **where) from None
        except (
            boto.ConnectionError,
            boto.HTTPClientError,
            boto.IncompleteReadError,
            ResponseParserError,
            Broken,
        ) as error:
            raise Unreachable("storage_unreachable", **where, reason=type(error).__name__) from None
        except (boto.BotoCoreError, ValueError) as error:  # a profile or an endpoint that is none
            raise Refused("storage_settings_wrong", **where, reason=error) from None
        except OSError as error:
            if not (code := _code(error)):
                if isinstance(error, TimeoutError):
                    raise Unreachable("storage_unreachable", **where, reason="TimeoutError") from None
                raise
            if code == "NoSuchBucket":
                raise Refused("no_such_bucket", **where, bucket=self.address.bucket) from None
            if isinstance(error, PermissionError):
                raise Refused("storage_refuses", **where, code=code) from None
            raise Unreachable("storage_unreachable", **where, reason=code) from None


def _connection() -> s3fs.S3FileSystem:
    import s3fs
    from aiobotocore.session import AioSession

    session = AioSession()
    credentials = Path(os.environ.get("CREDENTIALS_DIRECTORY", ""), CREDENTIALS)
    if "CREDENTIALS_DIRECTORY" in os.environ and credentials.exists():
        session.set_config_variable("credentials_file", str(credentials))
    connection = s3fs.S3FileSystem(
        session=session, config_kwargs=TIMEOUTS, use_listings_cache=False, skip_instance_cache=True
    )
    connection.retries = RETRIES
    connection.connect()
    return connection


def _path(address: Address) -> str:
    return f"{address.bucket}/{address.key}"


def _code(error: OSError) -> str:
    """What the server has said, such as 'SignatureDoesNotMatch' or '500'; '' where it was not the server."""
    from botocore.exceptions import ClientError

    cause = error.__cause__
    return str(cause.response["Error"].get("Code", "?")) if isinstance(cause, ClientError) else ""
