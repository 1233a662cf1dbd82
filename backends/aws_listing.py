"""What obstore cannot list on S3, and botocore (which s3fs brings along) can: unfinished multipart uploads, and objects
beside one whose name obstore takes for no path."""

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
from ckpt.storage.failure import from_reply, lost


def list_objects(url: str, bucket: str, prefix: str, config: Mapping[str, Any], below: str) -> list[ObjectInfo]:
    """All that lies below that folder, keys or none. `prefix`: the store's in the bucket."""
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
    """Aborts what was begun before that time (Unix seconds, the store's clock); how many. `prefix`: the store's in the
    bucket; `below`: those in the store, to whose keys `is_ours` is put."""
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
    except client.exceptions.NoSuchUpload:  # rclone's answer where there never was one
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
    return from_reply(url, what, reply["ResponseMetadata"]["HTTPStatusCode"], text)


@contextmanager
def _client(url: str, what: str, config: Mapping[str, Any]) -> Iterator[Any]:
    """One while the block runs, whose errors are ours: UsageError where botocore cannot use what the environment and
    ~/.aws say."""
    try:
        client = _made(config)
    except (botocore.exceptions.BotoCoreError, ValueError) as exc:
        told = f"{url}: {what}: {exc}; check the AWS variables, ~/.aws/config and ~/.aws/credentials"
        raise UsageError(told) from exc
    try:
        yield client
    except botocore.exceptions.ClientError as exc:
        raise _error(url, what, exc) from exc
    except botocore.exceptions.BotoCoreError as exc:
        raise lost(url, what, exc) from exc
    finally:
        client.close()


def _made(config: Mapping[str, Any]) -> Any:
    """Takes credentials where S3Store takes them, so that AWS_PROFILE may name one that is gone where variables give
    them; one try, since the retries are ours."""
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
