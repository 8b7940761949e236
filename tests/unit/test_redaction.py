"""effllm/store/redaction.py: the parts of a command line that are not written to run.json."""

import json
import time

from cases import cases

from effllm.store.redaction import REDACTED, redacted

SECRET = "Zx81-Qw9_rT"


@cases(
    "command",
    [
        ["--auth", SECRET],
        ["--pwd", SECRET],
        ["--pass", SECRET],
        ["--PGPASS", SECRET],
        ["--pat", SECRET],
        ["--bearer", SECRET],
        ["--keys", "first", SECRET],
        ["--api-key", f"-{SECRET}"],
        ["--hf_token=" + SECRET],
        ["--hf_token=a=" + SECRET],
        ["--hfToken", SECRET],
        ["WANDB_API_KEY=" + "0123456789abcdef" * 2 + SECRET],
        ["model.login=" + SECRET],
        ["+hub.password=" + SECRET],
        ["--db", f"postgres://me:{SECRET}@host:5432/runs"],
        ["--db", f"me:{SECRET}@host/runs"],
        ["--repo", f"https://{SECRET}@github.com/me/it.git"],
        ["--json", json.dumps({"lr": 1, "api_key": SECRET})],
        ["--json", json.dumps({"keys": ["first", SECRET]})],
        ["--json", json.dumps({"inner": json.dumps({"api_key": SECRET})})],
        ["--yaml", f"{{lr: 1, api_key: {SECRET}}}"],
        ["--header", f"Authorization: Bearer {SECRET}"],
        ["--header", f"Authorization: Basic {SECRET}"],
        ["--header", "Authorization:", "Bearer", SECRET],
        ["--header", f"X-Api-Key: {SECRET}"],
        ["--header", f"Cookie: a=b; c={SECRET}"],
        [f"https://me.blob.example/data?se=2027&sig={SECRET}"],
        [f"--data=https://s3.example/x?X-Amz-Signature={SECRET}&x=1"],
        ["--report", f"https://hooks.slack.com/services/T000/B000/{SECRET}"],
        ["--report", f"https://discord.com/api/webhooks/1/{SECRET}"],
        ["--report", f"https://api.telegram.org/bot12:{SECRET}/send"],
        ["--pem", f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}"],
    ],
)
def test_value_named_like_a_secret_is_removed(command):
    shown = redacted(["train.py", *command, "--lr", "1"])

    assert SECRET not in " ".join(shown)
    assert REDACTED in " ".join(shown)
    assert (shown[0], shown[-2:]) == ("train.py", ["--lr", "1"])


@cases(
    "token",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567",
        "sk-proj-abcDEF0123456789abcdef",
        "sk-ant-api03-abcDEF0123456789",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "github_pat_11ABCDEFG0123456789_abcdef",
        "glpat-abcdefghijklmnopqrst",
        "xoxb-123456789012-abcdefghijkl",
        "AKIAIOSFODNN7EXAMPLE",
        "AIzaSyA-0123456789abcdefghijklmnopqrstu",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc",
        "nvapi-abcdefghijklmnop0123",
    ],
)
@cases("place", ["{}", "--note={}", "look: {} here", '{{"note": "{}"}}', "https://h/?note={}"])
def test_token_of_a_known_service_is_removed(token, place):
    [shown] = redacted([place.format(token)])

    assert shown == place.format(REDACTED)


@cases(
    "command",
    [
        ["--tokenizer-type", "GPT2"],
        ["--tokenizer_name_or_path=hf_internal/tiny"],
        ["--max-tokens", "5"],
        ["--train-tokens=5"],
        ["--bypass-cache", "1", "--path", "a/b", "--author", "me", "--compass", "n"],
        ["--use-secret", "--lr", "1"],
        ["--data", "https://host:8080/a?x=1&y=2", "s3://bucket/a:b"],
        ["--image", "repo/image:tag@sha256:0123"],
        ["--json", '{"lr": 1, "layers": [1, 2]}'],
        ["--run-name", "global-batch-size-1024-and-more", "task-12345678901234567890"],
        ["--commit", "0123456789abcdef0123456789abcdef01234567"],
        ["optimizer.lr=1", "-x", ""],
    ],
)
def test_words_of_a_command_that_are_not_secrets_are_kept(command):
    assert redacted(command) == command


@cases("word", ["a" * 10**6, *(part * 10**5 for part in ('"', "a:", "http://", "key= ", "\\"))])
def test_long_word_is_redacted_quickly(word):
    began_s = time.process_time()

    [shown] = redacted([word])

    assert time.process_time() - began_s < 1.0
    assert len(shown) < 100_000
