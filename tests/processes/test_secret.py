"""effllm/network/secret.py: a user's secret file, rejected if other users can read it, and the derived keys."""

import os
import stat
import subprocess
import sys

import pytest

from effllm.network import secret
from effllm.network.secret import SecretError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "config" / "efficientllm" / "secret"


def write(path, content="a" * 64, mode=0o600):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(mode)
    return path


def test_created_secret_is_private_and_can_be_read(path):
    made = secret.read_or_create(path)

    assert len(made) == 64
    assert secret.read(path) == secret.read_or_create(path) == made
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    assert [one.name for one in path.parent.iterdir()] == ["secret"]


def test_ten_processes_started_together_read_the_same_secret(path):
    create = "from effllm.network import secret; print(secret.read_or_create(Path(sys.argv[1])))"
    code = f"import sys; from pathlib import Path; {create}"
    command = [sys.executable, "-c", code, str(path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(10)]
    outputs = {process.communicate(timeout=200)[0] for process in processes}

    assert outputs == {f"{secret.read(path)!r}\n".encode()}
    assert [one.name for one in path.parent.iterdir()] == ["secret"]


def test_missing_secret_is_reported_with_advice(path):
    with pytest.raises(SecretError) as caught:
        secret.read(path)

    assert str(path) in str(caught.value)
    assert "copy it from rank 0's" in str(caught.value)
    assert "EFFICIENTLLM_SECRET_FILE" in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_secret_readable_by_other_users_is_rejected_with_advice(path, mode):
    write(path, mode=mode)

    for take in (secret.read, secret.read_or_create):
        with pytest.raises(SecretError, match=f"chmod 600 {path}"):
            take(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode, "the mode must not be changed"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.symlink_to("real"), "is a link"),
        (lambda path: path.symlink_to("nowhere"), "is a link"),
        (lambda path: path.mkdir(), "no regular file"),
        (lambda path: os.mkfifo(path, 0o600), "no regular file"),
    ],
    ids=["link", "broken link", "folder", "pipe"],
)
def test_secret_file_is_rejected_if_it_is_a_link_folder_or_pipe(path, make, reason):
    write(path.with_name("real"))
    make(path)

    with pytest.raises(SecretError, match=reason):
        secret.read_or_create(path)


@pytest.mark.faults
@pytest.mark.skipif(os.geteuid() != 0, reason="another user's file needs root")
def test_secret_of_another_user_is_rejected(path):
    os.chown(write(path), 12345, 12345)

    with pytest.raises(SecretError, match="belongs to another user"):
        secret.read(path)


@pytest.mark.parametrize("content", ["", "abc1", "a" * 31, "   \n" * 20])
def test_short_secret_is_rejected_and_not_shown(path, content):
    write(path, content)

    with pytest.raises(SecretError, match="too short") as caught:
        secret.read(path)
    assert not content.strip() or content not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write anywhere")
def test_secret_folder_without_write_permission_is_reported(path):
    path.parent.mkdir(parents=True)
    path.parent.chmod(0o500)

    with pytest.raises(SecretError, match="set EFFICIENTLLM_SECRET_FILE"):
        secret.read_or_create(path)


def test_key_derivation_gives_the_results_of_rfc_5869():
    # Test case 1 of the RFC's appendix A; only the first 32 of its 42 bytes are compared.
    made = secret.hkdf(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)))

    assert made.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    # Test case 3 of the RFC has no salt and no info.
    assert secret.hkdf(b"\x0b" * 22, b"", b"").hex() == (
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
    )


def test_derived_keys_differ_by_purpose_job_and_secret():
    made = {
        secret.derive(own, purpose, job)
        for own in (b"a" * 64, b"b" * 64)
        for purpose in ("server", "agents")
        for job in ("", "one", "two")
    }
    assert len(made) == 12
    assert {len(one) for one in made} == {32}


def test_signature_is_valid_only_for_one_record_place_and_secret():
    own, record = b"a" * 64, {"endpoint": "tcp://10.0.0.1:5555", "job": "4711"}
    signed = secret.sign(own, record, "run/1")

    assert {name: signed[name] for name in record} == record
    assert secret.is_signed(own, signed, "run/1")
    assert not secret.is_signed(own, signed, "run/2")
    assert not secret.is_signed(b"b" * 64, signed, "run/1")
    for change in ({"endpoint": "tcp://10.0.0.2:5555"}, {"more": ""}, {"signature": ""}, {"signature": "ä"}):
        assert not secret.is_signed(own, {**signed, **change}, "run/1")
    assert not secret.is_signed(own, record, "run/1")
