"""The secret is read only from where nobody else can read it, and every refusal says what to do."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from ckpt import settings
from ckpt.errors import UsageError
from ckpt.ipc import secret

TEXT = "0123456789abcdefABCDEF0123456789" * 2


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(TEXT + "\n")
    path.chmod(0o600)
    return path


def test_a_secret_comes_from_a_file_or_a_line_or_is_made(file: Path) -> None:
    assert secret.read_file(file) == bytes.fromhex(TEXT)
    file.chmod(0o400)
    assert secret.read_file(file) == bytes.fromhex(TEXT)
    assert secret.read_stream(io.BytesIO(TEXT.encode() + b"\nmore")) == bytes.fromhex(TEXT)
    assert len(secret.make_secret()) == secret.SECRET_BYTES
    assert secret.make_secret() != secret.make_secret()


def test_a_file_counts_before_what_agents_know_and_that_before_a_new_one(file: Path) -> None:
    former = secret.make_secret()
    with_file, without = settings.read_settings({"CKPT_SECRET_FILE": str(file)}), settings.read_settings({})
    assert secret.choose_secret(with_file, former) == bytes.fromhex(TEXT)
    assert secret.choose_secret(without, former) == former
    assert len(secret.choose_secret(without, b"")) == secret.SECRET_BYTES


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_file_that_others_may_open_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 600"):
        secret.read_file(file)


@pytest.mark.parametrize("text", ["", "0" * 63, "0" * 65, "g" * 64, "0" * 64 + " x", "0" * 100_000])
def test_what_is_no_secret_is_refused_and_not_shown(file: Path, text: str) -> None:
    file.write_text(text)
    for read in (lambda: secret.read_file(file), lambda: secret.read_stream(io.BytesIO(text.encode()))):
        with pytest.raises(UsageError, match="64 hexadecimal digits") as caught:
            read()
        assert len(str(caught.value)) < 300


def test_what_is_no_file_of_ours_is_refused_without_waiting(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        secret.read_file(tmp_path / "missing")
    with pytest.raises(UsageError, match="is not a regular file"):
        secret.read_file(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="is not a regular file"):
        secret.read_file(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a regular file"):
        secret.read_file(Path("/dev/zero"))


def test_a_file_of_another_user_is_refused(file: Path) -> None:
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
        with pytest.raises(UsageError, match="belongs to user 12345"):
            secret.read_file(file)
    else:
        with pytest.raises(UsageError, match="belongs to user 0"):
            secret.read_file(Path("/etc/hostname"))
