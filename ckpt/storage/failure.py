"""Translation of failed HTTP exchanges into ckpt's errors, shared by the backends that speak HTTP; and advice for
messages.
"""

from __future__ import annotations

import re
import threading

from ckpt.errors import AccessDenied, AlreadyExists, CkptError, NotFound, StorageError, TransientError
from ckpt.storage.names import redact_url

_TRANSIENT_STATUSES = {
    408,
    425,
    429,
    500,
    502,
    503,
    504,
    509,
    *range(520, 528),
}  # 520 to 527: from a proxy before the store
# S3's 400 for a body that arrived incomplete.
_INCOMPLETE_BODY = re.compile(r"\b(?:RequestTimeout|IncompleteBody)\b")
_CREDENTIALS = re.compile(r"ExpiredToken|TokenRefreshRequired|InvalidToken|InvalidAccessKeyId|SignatureDoesNotMatch")
_FULL = re.compile(r"QuotaExceeded|InsufficientStorage|StorageFull|EntityTooLarge")


def error_of_reply(url: str, what: str, status: int, text: str) -> CkptError:
    """The error for an HTTP status that is not a success. `text`: the reply's body, or what is known of it."""
    told = f"{url}: {what}: the store answered {status}{_reply_summary(text)}"
    if _FULL.search(text) or status in (413, 507):
        return StorageError(f"{told}; the store is full: {full_store_hint(url)}, or raise the quota")
    if "RequestTimeTooSkewed" in text:
        return AccessDenied(f"{told}; this machine's clock differs too much from the store's: set the clock")
    if status in (401, 403) or _CREDENTIALS.search(text):
        return AccessDenied(
            f"{told}; check the credentials, and their permissions for this bucket. A running job reads a changed "
            "credentials file again. After a change of variables, start the job again"
        )
    if "ConditionalRequestConflict" in text or "OperationAborted" in text:
        # Another request for the key is under way, and may yet fail.
        return TransientError(told)
    if status == 404:
        return NotFound(told)
    if status in (409, 412):
        return AlreadyExists(told)
    if status in _TRANSIENT_STATUSES or (status == 400 and _INCOMPLETE_BODY.search(text)):
        return TransientError(told)
    return StorageError(told)


def connection_error(url: str, what: str, why: object) -> TransientError:
    """The error for a broken connection: it is unknown whether the request was carried out."""
    return TransientError(f"{url}: {what}: the connection failed: {why}")


def full_store_hint(url: str) -> str:
    """What to do about a full store."""
    how = f"`ckpt prune {redact_url(url)} --last 2 --yes` keeps only the newest two checkpoints"
    again = "; run it again 15 minutes later, which deletes the data" if "://" in url else ""
    return f"make room ({how}{again}; if no job runs and the store is completely full, add --now)"


def unrestorable_hint(url: str) -> str:
    """What to do about a URL whose checkpoints cannot be restored."""
    return f"Run `ckpt verify {redact_url(url)}` to see what is damaged. To start from the beginning, use another URL"


def _reply_summary(text: str) -> str:
    """Code and message of an S3 or Azure error document, else its first line."""
    found = [each[1].strip() for each in re.finditer(r"<(?:Code|Message)>([^<]{1,300})</", text)]
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f" ({': '.join(each for each in found if each) or line[:300]})" if text.strip() else ""


def check_not_cancelled(cancel: threading.Event | None, url: str, key: str) -> None:
    """Errors: StorageError if the put has been cancelled."""
    if cancel is not None and cancel.is_set():
        raise StorageError(f"{url}: put {key}: the put was cancelled")
