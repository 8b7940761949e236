"""The secret of a user: a file that only its owner can read, and the keys derived from it.

Only this file is secret.  Each process derives its keys and signatures (HKDF, RFC 5869), so that a store, argument,
environment or log never contains a key.  This module uses only the standard library, because the training process
imports it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from effllm.store import own_files

_BYTES = 32  # of randomness in a new secret, and the minimal length of a secret
_MAX_BYTES = 4096  # of the file that are read
_SIGNATURE = "signature"


class SecretError(OSError):
    """The secret is missing or not usable; the message is one line without the secret's content."""


def read(path: Path) -> bytes:
    """Return the secret in a file.

    Raises:
        SecretError: the secret is missing or too short, or other users can read it.
    """
    try:
        secret = own_files.read_private(path, _MAX_BYTES, os.O_NOFOLLOW).strip()
    except own_files.NotPrivateError as error:
        raise SecretError(f"the secret {error}") from None
    except FileNotFoundError:
        raise SecretError(
            f"there is no secret {path} on this host: copy it from rank 0's host, "
            "or set EFFICIENTLLM_SECRET_FILE to a file that all hosts can read"
        ) from None
    except OSError as error:
        if path.is_symlink():
            raise SecretError(f"the secret {path} is a link: name the file itself") from None
        raise SecretError(f"the secret {path} cannot be read: {error.strerror}") from error
    if len(secret) < _BYTES:
        raise SecretError(
            f"the secret {path} is too short ({len(secret)} bytes, the minimum is {_BYTES}): "
            "remove it, and a new secret is made"
        )
    return secret


def read_or_create(path: Path) -> bytes:
    """Return the secret in a file; create a missing file.  Concurrent calls return the same secret.

    Raises:
        SecretError: the file cannot be created, or the existing file is not usable.
    """
    if not os.path.lexists(path):
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create_atomically(path, secrets.token_hex(_BYTES).encode() + b"\n")
        except OSError as error:
            raise SecretError(
                f"no secret can be made at {path} ({error.strerror}): set EFFICIENTLLM_SECRET_FILE"
            ) from error
    return read(path)


def _create_atomically(path: Path, content: bytes) -> None:
    """Create a file atomically with its content; an existing file is kept."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another process was faster: its secret is used
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def derive(secret: bytes, purpose: str, job: str = "") -> bytes:
    """Return 32 bytes for one purpose in one job; the job's id is the salt."""
    return hkdf(secret, job.encode(), f"effllm 1 {purpose}".encode())


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """Return the first 32 bytes of HKDF's output with SHA-256 (RFC 5869)."""
    extracted = hmac.digest(salt or bytes(32), secret, hashlib.sha256)
    return hmac.digest(extracted, info + b"\x01", hashlib.sha256)


def sign(secret: bytes, record: Mapping[str, str], place: str) -> dict[str, str]:
    """Return the record with a signature that is valid only in one place, such as a run's key in torchrun's store."""
    return {**record, _SIGNATURE: _signature(secret, record, place)}


def is_signed(secret: bytes, record: Mapping[str, str], place: str) -> bool:
    signed = {name: value for name, value in record.items() if name != _SIGNATURE}
    signature = str(record.get(_SIGNATURE, ""))
    return hmac.compare_digest(signature.encode(), _signature(secret, signed, place).encode())


def _signature(secret: bytes, record: Mapping[str, str], place: str) -> str:
    body = json.dumps([place, dict(record)], sort_keys=True, separators=(",", ":")).encode()
    return hmac.digest(derive(secret, "record"), body, hashlib.sha256).hex()
