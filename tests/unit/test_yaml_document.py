"""YAML of users: merge keys, and documents that are refused."""

import pytest

pytest.importorskip("yaml", reason="needs the extra analysis")

import yaml

from effllm.analysis.yaml_document import load_yaml
from effllm.commands.campaign import WrongPlan, read_plan
from effllm.commands.fit_sources import UnreadableModel, find_source


def laughs(merge):
    """Return a document of 9^11 values, as nested lists or by merge keys."""
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, 12):
        names = ", ".join([f"*a{level - 1}"] * 9)
        value = f"{{<<: [{names}], y{level}: 1}}" if merge else f"[{names}]"
        lines.append(f"a{level}: &a{level} {value}")
    return "\n".join(lines)


def test_merge_keys_are_expanded_and_own_keys_win():
    text = "one: &one {x: 1, y: 1}\ntwo: &two {<<: *one, y: 2}\nthree: {<<: [*two, *one], z: 3}"

    assert load_yaml(text) == {"one": {"x": 1, "y": 1}, "two": {"x": 1, "y": 2}, "three": {"x": 1, "y": 2, "z": 3}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (laughs(merge=True), "more than 100,000 values"),
        (laughs(merge=False), "more than 100,000 values"),
        ("&a [*a]", "an alias refers to itself"),
        ("a: &a {<<: *a}", "an alias refers to itself"),
        ("a: 1\na: 2", "the key a is given twice"),
        ("a: 2026-99-99", "month must be in"),
        ("!!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("a: 1\n<<: 2", "expected a mapping"),
    ],
)
def test_documents_that_are_wrong_or_huge_are_refused(tmp_path, text, message):
    path = tmp_path / "a.yaml"
    path.write_text(text)

    with pytest.raises(yaml.YAMLError, match=message):
        load_yaml(text)
    with pytest.raises(WrongPlan, match=message):
        read_plan(path)
    with pytest.raises(UnreadableModel, match=message):
        find_source(str(path))


def test_merge_keys_of_a_yaml_of_fit_are_expanded(tmp_path):
    path = tmp_path / "sft.yaml"
    path.write_text(
        "defaults: &defaults {cutoff_len: 4096, per_device_train_batch_size: 2}\n"
        "<<: *defaults\nmodel_name_or_path: qwen3-8b\nper_device_train_batch_size: 3\n"
    )

    settings = find_source(str(path)).settings

    assert (settings["seq_length"], settings["micro_batch"]) == (4096, 3)
