"""Listings on S3 that obstore lacks, by botocore (which s3fs brings along): unfinished multipart uploads, and folders
with an object whose name obstore does not accept as a path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import botocore.config  # type: ignore[import-untyped]
import botocore.exceptions  # type: ignore[import-untyped]
import botocore.session  # type: ignore[import-untyped]

from ckpt.errors import NotFound, UsageError
from ckpt.storage.contract import ObjectInfo
from ckpt.storage.failure import connection_error, error_of_reply


def list_objects(url: str, bucket: str, prefix: str, config: Mapping[str, Any], below: str) -> list[ObjectInfo]:
    """All objects below the folder `below`, also those that are not keys. `prefix`: the store's path in the bucket."""
    folder = f"{prefix}/" if prefix else ""
    with _client(url, f"list {below}", config) as client:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=folder + below)
        return [
            ObjectInfo(
                each["Key"][len(folder) :], each["Size"], each["LastModified"].timestamp(), each["ETag"].strip('"')
            )
            for page in pages
            for each in page.get("Contents", [])
        ]


def abort_uploads(
    url: str,
    bucket: str,
    prefix: str,
    config: Mapping[str, Any],
    before_s: float,
    below: Sequence[str],
    is_ours: Callable[[str], bool],
) -> int:
    """Aborts the uploads begun before `before_s` (Unix seconds, the store's clock). Returns their number. `prefix`: the
    store's path in the bucket. `below`: prefixes in the store; only uploads to a key that `is_ours` accepts."""
    folder = f"{prefix}/" if prefix else ""
    ended = 0
    with _client(url, "abort uploads", config) as client:
        for each in below:
            for upload in _unfinished(client, bucket, folder + each):
                key = upload["Key"].removeprefix(folder)
                mine = upload["Key"] == folder + key and key.startswith(each) and is_ours(key)
                if mine and upload["Initiated"].timestamp() < before_s:
                    ended += _abort(client, bucket, upload, url)
    return ended


def _unfinished(client: Any, bucket: str, prefix: str) -> list[Mapping[str, Any]]:
    pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
    try:
        return [upload for page in pages for upload in page.get("Uploads", [])]
    # rclone's answer if there never was an upload.
    except client.exceptions.NoSuchUpload:
        return []


def _abort(client: Any, bucket: str, upload: Mapping[str, Any], url: str) -> bool:
    try:
        client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    except botocore.exceptions.ClientError as exc:
        if isinstance(_error(url, "abort uploads", exc), NotFound):  # it has ended meanwhile
            return False
        raise
    return True


def _error(url: str, what: str, exc: botocore.exceptions.ClientError) -> Exception:
    reply = exc.response
    text = f"<Code>{reply['Error'].get('Code', '')}</Code><Message>{reply['Error'].get('Message', '')}</Message>"
    return error_of_reply(url, what, reply["ResponseMetadata"]["HTTPStatusCode"], text)


@contextmanager
def _client(url: str, what: str, config: Mapping[str, Any]) -> Iterator[Any]:
    """A client while the block runs. Its errors are translated to ours: UsageError if botocore cannot use the
    environment and ~/.aws."""
    try:
        client = _make_client(config)
    except (botocore.exceptions.BotoCoreError, ValueError) as exc:
        told = f"{url}: {what}: {exc}; check the AWS variables, ~/.aws/config and ~/.aws/credentials"
        raise UsageError(told) from exc
    try:
        yield client
    except botocore.exceptions.ClientError as exc:
        raise _error(url, what, exc) from exc
    except botocore.exceptions.BotoCoreError as exc:
        raise connection_error(url, what, exc) from exc
    finally:
        client.close()


def _make_client(config: Mapping[str, Any]) -> Any:
    """A client that takes its credentials from where S3Store takes them. So AWS_PROFILE may name a missing profile if
    variables give credentials. One try per request, since the retries are ours."""
    no_profile = {} if "credential_provider" in config else {"profile": (None, None, None, None)}
    endpoint = config.get("endpoint")
    return botocore.session.Session(session_vars=no_profile).create_client(
        "s3",
        endpoint_url=endpoint,
        region_name=config.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        config=botocore.config.Config(
            retries={"total_max_attempts": 1},
            connect_timeout=10,
            read_timeout=30,
            s3={"addressing_style": "path" if endpoint else "auto"},
        ),
    )
