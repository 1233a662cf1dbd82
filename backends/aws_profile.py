"""Credentials from AWS_PROFILE and ~/.aws (also SSO and assumed roles), by botocore, which s3fs brings along.

obstore reads only variables. This module is loaded only if no variable gives credentials, since importing botocore
takes 0.1 s.
"""

from __future__ import annotations

import datetime
from typing import Any

import botocore.exceptions  # type: ignore[import-untyped]
import botocore.session  # type: ignore[import-untyped]

from ckpt.errors import AccessDenied, UsageError

# botocore renews credentials in time by itself when asked for them.
REFRESH = datetime.timedelta(minutes=10)


def profile_config(profile: str | None) -> dict[str, Any]:
    """Arguments for S3Store: a credential provider, and the profile's region and endpoint. Errors: UsageError."""
    session = botocore.session.Session(profile=profile)
    try:
        credentials = session.get_credentials()
        region = session.get_config_variable("region")
        scoped = session.get_scoped_config()
    except botocore.exceptions.BotoCoreError as exc:
        raise UsageError(f"AWS_PROFILE={profile!r}: {exc}; check ~/.aws/config and ~/.aws/credentials") from exc
    config: dict[str, Any] = {}
    if credentials is not None:
        config["credential_provider"] = _Provider(credentials)
    if region:
        config["region"] = region
    if scoped.get("endpoint_url"):
        config["endpoint"] = scoped["endpoint_url"]
    return config


class _Provider:
    """Gives credentials to obstore, which calls it on any thread when the last ones are about to expire."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def __call__(self) -> dict[str, Any]:
        try:
            frozen = self._credentials.get_frozen_credentials()
        except botocore.exceptions.BotoCoreError as exc:
            raise AccessDenied(f"the AWS credentials could not be renewed: {exc}; log in again") from exc
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.datetime.now(datetime.UTC) + REFRESH,
        }
