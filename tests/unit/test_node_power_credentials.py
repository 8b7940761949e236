"""The credentials file of a Redfish service: only the owner can read the file, and no message contains its text."""

import os

import pytest

from effllm.devices.node.redfish import read_credentials

SECRET = "hunter2"


@pytest.fixture
def write(tmp_path):
    def write_file(text, mode=0o600):
        file = tmp_path / "bmc"
        file.write_text(text)
        file.chmod(mode)
        return file

    return write_file


def refusal(file):
    with pytest.raises(ValueError) as caught:
        read_credentials(file)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_keys_of_the_file_are_read(write):
    file = write(
        f"# the monitoring user\n\nuser = monitor\npassword={SECRET} = with spaces # and signs\n"
        f"ca_file = /etc/bmc.pem\nfingerprint = sha256 Fingerprint={'AB:' * 31}AB\n"
    )
    credentials = read_credentials(file)

    assert (credentials.user, credentials.password) == ("monitor", f"{SECRET} = with spaces # and signs")
    assert (credentials.ca_file, credentials.fingerprint) == ("/etc/bmc.pem", "ab" * 32)


def test_user_and_password_are_enough_and_the_password_is_not_printed(write):
    credentials = read_credentials(write(f"user = monitor\npassword = {SECRET}\n"))

    assert (credentials.ca_file, credentials.fingerprint) == (None, None)
    assert SECRET not in repr(credentials)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601, 0o777])
def test_credentials_readable_by_others_are_rejected_with_a_remedy(write, mode):
    file = write(f"user = monitor\npassword = {SECRET}\n", mode)

    assert refusal(file).startswith(f"{file} can be read by other users: ")
    assert refusal(file).endswith(f"chmod 600 {file}")


def test_credentials_file_of_another_user_is_rejected(write, monkeypatch):
    file = write(f"user = monitor\npassword = {SECRET}\n")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    assert refusal(file).endswith("belongs to another user: it must belong to the user who runs the job")


def test_missing_credentials_file_is_reported(tmp_path):
    assert refusal(tmp_path / "nowhere").endswith("cannot be read: No such file or directory")


def test_folder_and_pipe_are_rejected_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)

    assert "no regular file" in refusal(tmp_path)
    assert "no regular file" in refusal(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (SECRET, "line 1 must be 'key = value'"),
        (f"user = monitor\npasswort = {SECRET}\n", "line 2 must be"),
        (f"user = a\nuser = b\npassword = {SECRET}\n", "line 2 must be"),
        (f"password = {SECRET}\n", "has no user"),
        ("", "has no user and no password"),
        (f"user = a\npassword = {SECRET}\nfingerprint = {SECRET}\n", "64 hexadecimal digits"),
    ],
)
def test_errors_give_the_line_number_and_never_the_text_of_the_line(write, text, reason):
    assert reason in refusal(write(text))


def test_bytes_that_are_not_text_are_rejected(write):
    file = write("")
    file.write_bytes(b"user = \xff\xfe")

    assert refusal(file).endswith("is not text")
