"""User, password and certificate for a Redfish service, in a file that only its owner can read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from effllm.store import own_files

BASIC, SESSION = "basic", "session"
_MAX_BYTES = 16 * 1024


class CredentialsError(ValueError):
    """The file is not usable; the message is one line without the file's content."""


@dataclass(frozen=True)
class Credentials:
    """The content of a credentials file."""

    user: str
    password: str = field(repr=False)
    authentication: str = BASIC
    ca_file: Path | None = None  # certificate authorities; None: the system's authorities
    fingerprint: bytes | None = None  # SHA-256 of the only accepted certificate; name and issuer are ignored

    @classmethod
    def read(cls, path: Path) -> Credentials:
        """Read lines of the form ``key = value``; blank lines and lines that begin with ``#`` are ignored.

        Raises:
            CredentialsError: other users may read the file, or a key is wrong or missing.
        """
        values: dict[str, str] = {}
        for number, line in enumerate(_private_text(path).splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            key, equals, value = (part.strip() for part in line.partition("="))
            if not equals or key not in _KEYS or key in values:
                raise CredentialsError(
                    f"{path}: line {number} must be 'key = value', with each key at most once; the keys are "
                    f"{', '.join(_KEYS)}"
                )
            values[key] = value
        missing = [key for key in ("user", "password") if not values.get(key)]
        if missing:
            raise CredentialsError(f"{path} has no {' and no '.join(missing)}")
        return cls(
            user=values["user"],
            password=values["password"],
            authentication=_authentication(path, values.get("authentication", BASIC)),
            ca_file=Path(values["ca_file"]).expanduser() if values.get("ca_file") else None,
            fingerprint=_fingerprint(path, values["fingerprint"]) if values.get("fingerprint") else None,
        )


_KEYS = ("user", "password", "authentication", "ca_file", "fingerprint")


def _private_text(path: Path) -> str:
    try:
        return own_files.read_private(path, _MAX_BYTES).decode()
    except own_files.NotPrivateError as error:
        raise CredentialsError(str(error)) from None
    except UnicodeDecodeError:
        raise CredentialsError(f"{path} is not text") from None
    except OSError as error:
        raise CredentialsError(f"{path} cannot be read: {error.strerror}") from error


def _authentication(path: Path, value: str) -> str:
    if value not in (BASIC, SESSION):
        raise CredentialsError(f"{path}: authentication must be {BASIC} or {SESSION}")
    return value


def _fingerprint(path: Path, value: str) -> bytes:
    digits = value.lower().removeprefix("sha256:").removeprefix("sha256 fingerprint=").replace(":", "")
    if not re.fullmatch("[0-9a-f]{64}", digits):
        raise CredentialsError(f"{path}: fingerprint must be the SHA-256 of the certificate, 64 hexadecimal digits")
    return bytes.fromhex(digits)
