"""What obstore says that went wrong, as our errors. Only its text carries the server's reply."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError

from ckpt.backends.cloud_config import ENDPOINTS
from ckpt.errors import AccessDenied, AlreadyExists, CkptError, NotFound, StorageError
from ckpt.storage.failure import connection_error, error_of_reply

_CREDENTIALS_HINT = (
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE "
    "(gs: GOOGLE_APPLICATION_CREDENTIALS; az: AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY)"
)
_METADATA_SERVICE = re.compile(
    r"169\.254\.169\.254|metadata\.google\.internal|/latest/(?:api/token|meta-data/iam)|/computeMetadata/v1/|"
    r"/metadata/identity/oauth2/"
)
_SERVICE = re.compile(r"https?://[^/\s]+")
# The providers asked for credentials before the metadata service.
_PROVIDERS = {
    "s3": "the variables (AWS_ACCESS_KEY_ID, a web identity, a container's role), AWS_PROFILE and ~/.aws",
    "gs": "the variables (GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SERVICE_ACCOUNT) and gcloud's own file",
    "az": "the variables (AZURE_STORAGE_ACCOUNT_KEY, a SAS token, a client secret)",
}
_NO_BUCKET = re.compile(
    r"NoSuchBucket|ContainerNotFound|ContainerBeingDeleted|The specified (?:bucket|container) does not exist"
)
_STATUS = re.compile(r"status code: (\d{3})|Bulk delete request failed.*\(code: (\d{3})\)")  # the latter: Azure
# The outcome for one key of an S3 bulk delete whose reply was itself a 200.
_NOT_DELETED = re.compile(
    r"DeleteObjects request failed for key .*\(code: (\w+)\)|error response: .*<Code>(\w+)</Code>"
)
_CODES = {"AccessDenied": 403, "NoSuchKey": 404, "InternalError": 500, "SlowDown": 503, "ServiceUnavailable": 503}


class NoPath(StorageError):
    """The name of a foreign object, such as a//b, is not a path to obstore, which then lists nothing beside it."""


class NotPartial(StorageError):
    """The store answered a ranged get with 200."""


class CloudErrors:
    """Translates the errors of one bucket or container."""

    def __init__(self, url: str, scheme: str, bucket: str) -> None:
        self._url = url
        self._scheme = scheme
        self._bucket = bucket
        # Whether the store has ever answered. From then on missing credentials count as a transient fault.
        self._has_answered = False

    @contextmanager
    def translate(self, what: str, *, asks: bool = True) -> Iterator[None]:
        """Translates the errors of the block. `asks`: whether it asks the store. If so, success means that the
        store answers and accepts our credentials."""
        try:
            yield
        except (BaseError, FileNotFoundError, OSError, ValueError) as exc:
            raise self._error(what, exc, asks) from exc
        except BaseException as exc:
            # Rust's panic is no Exception, and no module exports its class.
            if type(exc).__name__ != "PanicException":
                raise
            raise StorageError(f"{self._url}: {what}: obstore cannot read the store's reply: {exc}") from exc
        self._has_answered |= asks

    def _error(self, what: str, exc: Exception, asks: bool = True) -> CkptError:
        if isinstance(exc, CkptError):
            return exc
        text = str(exc)
        said = text.partition("\n\nDebug source")[0]
        # The text contains a name that somebody else has chosen, so it must not be matched below.
        if isinstance(exc, InvalidPathError):
            return NoPath(
                f"{self._url}: {what}: {said}; obstore cannot list this folder: rename or remove the object with that "
                "name"
            )
        if "non-partial response" in text:
            return NotPartial(said)
        if _METADATA_SERVICE.search(text):
            if self._has_answered:
                return connection_error(self._url, what, f"the credentials could not be renewed: {said}")
            service = _SERVICE.search(said)
            where = f" at {service[0]}" if service is not None else ""
            return AccessDenied(
                f"{self._url}: no credentials were found. ckpt tried {_PROVIDERS[self._scheme]}, and last the metadata "
                f"service of this machine{where}. Set {_CREDENTIALS_HINT}"
            )
        if status := _STATUS.search(text):
            return self.of_reply(what, int(status[1] or status[2]), said)
        if code := _NOT_DELETED.search(said):
            return self.of_reply(what, _CODES.get(code[1] or code[2], 400), said)
        if isinstance(exc, AlreadyExistsError):
            return AlreadyExists(f"{self._url}: {what}: the object exists already")
        if isinstance(exc, FileNotFoundError):
            return NotFound(f"{self._url}: {what}: there is no such object")
        if "redirect" in text:
            return StorageError(f"{self._url}: the bucket is in another region; set AWS_REGION to it ({said})")
        if "Builder" in text or "InvalidCertificate" in text or "certificate" in text:
            names = ", ".join(ENDPOINTS[self._scheme])
            authority = ", and AWS_CA_BUNDLE if a private authority signed its certificate"
            more = authority if self._scheme == "s3" else ""
            return StorageError(f"{self._url}: {what}: the endpoint cannot be used: check {names}{more} ({said})")
        if "HTTP error" in text:
            kinds = re.findall(r'(?:kind|error): "?([^",\n]+)"?,', text)
            return connection_error(self._url, what, f"{said.strip()} ({', '.join(dict.fromkeys(kinds))})")
        if not asks:  # then only the environment can be wrong
            return AccessDenied(f"{self._url}: {what}: {said}; set {_CREDENTIALS_HINT}")
        return StorageError(f"{self._url}: {what}: {said}")

    def of_reply(self, what: str, status: int, text: str) -> CkptError:
        """The error for a reply that is not a success."""
        if _NO_BUCKET.search(text):
            return StorageError(
                f"{self._url}: there is no bucket {self._bucket}; create it, or check the URL and the endpoint"
            )
        return error_of_reply(self._url, what, status, text)
