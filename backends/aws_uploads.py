"""Unfinished multipart uploads on S3: obstore cannot list them, botocore (which s3fs brings along) can."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import botocore.config  # type: ignore[import-untyped]
import botocore.exceptions  # type: ignore[import-untyped]
import botocore.session  # type: ignore[import-untyped]

from ckpt.errors import NotFound
from ckpt.storage.failure import from_reply, lost


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
    client = _client(config)
    folder = f"{prefix}/" if prefix else ""
    ended = 0
    try:
        for each in below:
            pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=folder + each)
            for upload in [upload for page in pages for upload in page.get("Uploads", [])]:
                key = upload["Key"].removeprefix(folder)
                mine = upload["Key"] == folder + key and key.startswith(each) and is_ours(key)
                if mine and upload["Initiated"].timestamp() < before_s:
                    ended += _abort(client, bucket, upload, url)
    except botocore.exceptions.ClientError as exc:
        raise _error(url, exc) from exc
    except botocore.exceptions.BotoCoreError as exc:
        raise lost(url, "abort uploads", exc) from exc
    finally:
        client.close()
    return ended


def _abort(client: Any, bucket: str, upload: Mapping[str, Any], url: str) -> bool:
    try:
        client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    except botocore.exceptions.ClientError as exc:
        if isinstance(_error(url, exc), NotFound):  # it has ended meanwhile
            return False
        raise
    return True


def _error(url: str, exc: botocore.exceptions.ClientError) -> Exception:
    reply = exc.response
    text = f"<Code>{reply['Error'].get('Code', '')}</Code><Message>{reply['Error'].get('Message', '')}</Message>"
    return from_reply(url, "abort uploads", reply["ResponseMetadata"]["HTTPStatusCode"], text)


def _client(config: Mapping[str, Any]) -> Any:
    """Takes credentials where S3Store takes them; one try, since the retries are ours."""
    endpoint = config.get("endpoint")
    return botocore.session.get_session().create_client(
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
