"""What obstore is opened with: the environment, profiles of AWS, endpoints and certificates."""

from __future__ import annotations

import os
import re
import ssl
import urllib.parse
from collections.abc import Mapping
from typing import Any

from ckpt.errors import UsageError

CERTIFICATES_BYTES_MAX = 8 << 20
# The variables that name the endpoint, in order of precedence.
ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_LOOPBACK = re.compile(r"https?://(127\.[0-9.]+|localhost|\[::1\])(:|/|$)")
_S3_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def s3_config(env: Mapping[str, str]) -> dict[str, Any]:
    """The arguments that S3Store does not take from the environment by itself."""
    config: dict[str, Any] = {}
    if not any(env.get(name) for name in _S3_CREDENTIALS) and _has_profile(env):
        from ckpt.backends.aws_profile import profile_config

        config.update(profile_config(env.get("AWS_PROFILE")))
    endpoint = _endpoint("s3", env, config.get("endpoint"))
    if endpoint:
        config["endpoint"] = endpoint
        config["client_options"] = {"allow_http": endpoint.startswith("http://")}
    if bundle := env.get("AWS_CA_BUNDLE"):
        config["client_options"] = {**config.get("client_options", {}), "root_certificate": _certificates(bundle)}
    private = not endpoint or endpoint.startswith("https://") or _LOOPBACK.match(endpoint)
    if private and "AWS_UNSIGNED_PAYLOAD" not in env:
        config["unsigned_payload"] = True
    return config


def other_config(scheme: str, env: Mapping[str, str]) -> dict[str, Any]:
    """The arguments that GCSStore and AzureStore do not take from the environment by themselves: an endpoint named with
    http:// is used without TLS."""
    endpoint = _endpoint(scheme, env)
    if endpoint is None:
        return {}
    name = "base_url" if scheme == "gs" else "endpoint"
    return {name: endpoint, "client_options": {"allow_http": endpoint.startswith("http://")}}


def _endpoint(scheme: str, env: Mapping[str, str], default: str | None = None) -> str | None:
    """The endpoint that the environment names, or `default`. Errors: UsageError if it is not an HTTP URL."""
    name = next((name for name in ENDPOINTS[scheme] if env.get(name)), None)
    endpoint = env[name] if name else default
    if endpoint is None:
        return None
    parsed = urllib.parse.urlsplit(endpoint)
    if parsed.scheme not in ("http", "https") or not parsed.hostname:
        named = name or "the profile's endpoint_url"
        raise UsageError(f"{named}={endpoint!r} is not an endpoint; give one like https://storage.example.com:443")
    return endpoint.rstrip("/")


def _certificates(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(CERTIFICATES_BYTES_MAX)
        ssl.create_default_context().load_verify_locations(cadata=data.decode("ascii"))
    except (OSError, ValueError) as exc:  # ssl's own errors are OSErrors
        raise UsageError(f"AWS_CA_BUNDLE={path!r} is not a file of PEM certificates: {exc}") from exc
    return data


def _has_profile(env: Mapping[str, str]) -> bool:
    files = (
        env.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials"),
        env.get("AWS_CONFIG_FILE") or os.path.expanduser("~/.aws/config"),
    )
    return bool(env.get("AWS_PROFILE")) or any(os.path.exists(each) for each in files)
