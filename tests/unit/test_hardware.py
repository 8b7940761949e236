"""The hardware table: names, numbers calculated by hand from datasheets, and the documentation page.

As a script, this file rewrites the tables of docs/hardware.md.
"""

import random
from pathlib import Path

import pytest
from cases import cases
from hypothesis import given
from hypothesis import strategies as st

from effllm.devices.known import hardware
from effllm.devices.known.hardware import (
    PRECISIONS,
    ROWS,
    SENSORS,
    find_by_driver_name,
    find_by_typed_words,
    peak_clock_hz,
    peak_flops_per_s,
    why_no_peak,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hardware.md"

# name printed by the driver; from the datasheet: dense bf16 in TFLOP/s and power in W
KNOWN = [
    ("NVIDIA A100-SXM4-80GB", 312, 400),
    ("NVIDIA H100 80GB HBM3", 989.4, 700),  # 1978.9 sparse
    ("NVIDIA H100 NVL", 835.5, 400),  # 1671 sparse / 2
    ("NVIDIA GH200 480GB", 989.4, 1000),
    ("NVIDIA B200", 2250, 1000),  # HGX: 36 PFLOPS sparse / 8 GPUs / 2
    ("NVIDIA GB200", 2500, 1200),  # NVL72: 5 PFLOPS sparse / 2
    ("NVIDIA GB10", 125, 140),  # 1 PFLOP of sparse FP4 / 2 / 4
    ("NVIDIA L40S", 362.05, 350),
    ("NVIDIA RTX A6000", 154.8, 300),
    ("NVIDIA GeForce RTX 4090", 165.2, 450),  # 128 SMs x 512 x 2.52 GHz
    ("NVIDIA A100-SXM-64GB", 358.1, None),  # 124 SMs x 2048 x 1.41 GHz
    ("Tesla V100-SXM2-32GB", None, 300),
    ("AMD Instinct MI250X", 191.5, 280),  # one die: 383 TFLOP/s and 560 W / 2
    ("AMD Instinct MI355X", 2516.6, 1400),  # 256 CUs x 4096 x 2.4 GHz
]

# Values with sparsity from datasheets, in TFLOP/s.
SPARSE = [
    ("NVIDIA A100-SXM4-80GB", "tf32", 312),
    ("NVIDIA A100-SXM4-80GB", "int8", 1248),
    ("NVIDIA H100 80GB HBM3", "fp8", 3957.8),
    ("NVIDIA H100 PCIe", "fp16", 1513),
    ("NVIDIA B200", "fp4", 18000),
    ("NVIDIA L4", "fp8", 485),
    ("NVIDIA GeForce RTX 5090", "fp4", 3352),
    ("AMD Instinct MI300X", "bf16", 2614.9),
]

NAMES = [name for row in ROWS for name in row.names]
WORDS = sorted({word for name in NAMES for word in name.replace("-", " ").split()})


@cases(("name", "bf16_tflops", "tdp_w"), KNOWN)
def test_device_is_found_by_the_name_its_driver_prints(name, bf16_tflops, tdp_w):
    row = find_by_driver_name(name)

    assert name in row.names
    assert not row.is_slice
    assert row.tdp_w == tdp_w
    expected = None if bf16_tflops is None else float(f"{bf16_tflops}e12")
    assert peak_flops_per_s(name) == row.flops_per_s.get("bf16") == expected


@cases(
    ("name", "tflops"),
    [
        ("Tesla V100-SXM2-32GB", 125),
        ("Tesla T4", 65),
        ("Quadro RTX 8000", 130.5),
    ],
)
def test_volta_and_older_gpus_have_fp16_peaks(name, tflops):
    assert peak_flops_per_s(name, "fp16") == tflops * 1e12


@cases(
    ("name", "gib", "gb_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", 80, 3350),
        ("NVIDIA H200", 141, 4800),
        ("AMD Instinct MI300X", 192, 5325),
        ("AMD Instinct MI250X", 64, 1638.4),  # half of the module: 128 GiB and 3276.8 GB/s
    ],
)
def test_memory_sizes_use_powers_of_two_and_bandwidths_powers_of_ten(name, gib, gb_per_s):
    assert (find_by_driver_name(name).memory_bytes, find_by_driver_name(name).memory_bytes_per_s) == (
        gib * 2**30,
        gb_per_s * 1e9,
    )


@cases("name", NAMES)
def test_case_brand_and_word_order_of_a_device_name_are_ignored(name):
    row = find_by_driver_name(name)
    without_brand = name.removeprefix("NVIDIA ").removeprefix("AMD ").removeprefix("Tesla ")

    assert find_by_driver_name(name.upper()) is row
    assert find_by_driver_name(name.lower()) is row
    assert find_by_driver_name(without_brand) is row
    assert find_by_driver_name(f"  {name} ") is row
    assert find_by_driver_name(" ".join(reversed(name.replace("-", " ").split()))) is row


@cases(
    ("name", "same"),
    [
        ("AMD INSTINCT MI250 (MCM) OAM AC MBA", "AMD Instinct MI250"),
        ("AMD Instinct MI300X OAM", "AMD Instinct MI300X"),
        ("AMD Instinct MI355X VF", "AMD Instinct MI355X"),
        ("NVIDIA B300", "NVIDIA B300 SXM6 AC"),
        ("NVIDIA Tesla V100-SXM2-16GB", "Tesla V100-SXM2-16GB"),
        ("A100-SXM-80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA GH200 120GB", "NVIDIA GH200 480GB"),
    ],
)
def test_name_parts_unrelated_to_the_chip_are_ignored(name, same):
    assert find_by_driver_name(name) is find_by_driver_name(same)
    assert find_by_driver_name(same) is not None


@cases(
    "name",
    [
        "",
        "NVIDIA",
        "NVIDIA RTX A1000",
        "NVIDIA A100X",
        "NVIDIA A100",  # the name has no form factor and no memory size
        "NVIDIA H200 PCIe",
        "NVIDIA A16",  # no document with a rate was found
        "Tesla V100-SXM2-32GB-LS",  # its clock is lower than that of other V100
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 5090 D v2",
        "AMD Instinct MI300X HF",
        "AMD Radeon RX 7900 XTX",
        "MIG 1g.10gb",
    ],
)
def test_unlisted_device_gets_no_numbers_of_a_similar_device(name):
    assert find_by_driver_name(name) is None
    assert peak_flops_per_s(name) is None


@cases(
    ("name", "whole"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3"),
        ("nvidia h200 mig 7g.141gb", "NVIDIA H200"),
    ],
)
def test_slice_has_the_numbers_of_its_device_but_no_peak(name, whole):
    slice_of = find_by_driver_name(name)

    assert slice_of.is_slice
    assert slice_of.names == find_by_driver_name(whole).names
    assert slice_of.flops_per_s == find_by_driver_name(whole).flops_per_s
    assert slice_of.tdp_w == find_by_driver_name(whole).tdp_w
    assert peak_flops_per_s(name) is None, "its share is not guessed here"
    assert why_no_peak(name) == f"{name!r} is a MIG slice, which has no published peak"


@cases(
    "name",
    [
        *("NVIDIA A40-48Q", "NVIDIA L40S-8C", "NVIDIA L40S-48", "NVIDIA A16-16Q", "GRID T4-16Q", "GRID T4-2B4"),
        *("GRID A100D-80C", "GRID A100-4-20C", "NVIDIA H100XM-80C", "NVIDIA H100-1-10CME"),
        *("NVIDIA H200-141C", "NVIDIA H800-80C", "NVIDIA H100-80C"),  # PCIe boards, not the SXM boards of that name
    ],
)
def test_virtual_gpu_has_no_row_and_a_reason(name):
    assert find_by_driver_name(name) is None
    assert peak_flops_per_s(name) is None
    assert why_no_peak(name) == f"{name!r} is a virtual GPU, and its share of the board is unknown"


@cases("name", NAMES)
def test_reason_is_given_only_for_a_device_without_a_peak(name):
    has_peak = bool(peak_flops_per_s(name) or peak_flops_per_s(name, "fp16"))

    assert (why_no_peak(name) == "") == has_peak


def test_short_name_is_that_of_a_board_with_known_memory():
    assert find_by_driver_name("NVIDIA H100").memory_bytes is None, "modules with 64, 94 and 96 GB have this name"
    assert (
        find_by_typed_words("h100").names[0] == find_by_typed_words("NVIDIA H100").names[0] == "NVIDIA H100 80GB HBM3"
    )


def test_ambiguous_name_has_no_peak():
    either = find_by_driver_name("AMD Instinct MI250X / MI250")

    assert peak_flops_per_s("AMD Instinct MI250X / MI250") is None
    assert either.tdp_w is None
    assert either.memory_bytes == 64 * 2**30


def test_missing_precision_is_none_and_unknown_precision_is_an_error():
    assert peak_flops_per_s("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3", "fp4") is None
    with pytest.raises(ValueError, match=r"'bfloat16', not one of fp64, .*bf16"):
        peak_flops_per_s("NVIDIA H100 80GB HBM3", "bfloat16")


# --- the order of the rows has no effect ----------------------------------------------------------


def test_two_hardware_rows_with_the_same_name_are_rejected():
    twice = [find_by_driver_name("NVIDIA L4"), find_by_driver_name("NVIDIA L40"), find_by_driver_name("NVIDIA L4")]

    with pytest.raises(ValueError, match="NVIDIA L4 and NVIDIA L4 share the name l4"):
        hardware._rows_by_words(twice)


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=6), st.integers())
def test_order_of_hardware_rows_does_not_change_the_found_device(words, seed):
    shuffled = list(ROWS)
    random.Random(seed).shuffle(shuffled)
    index = hardware._rows_by_words(shuffled)

    for name in [*NAMES, " ".join(words)]:
        assert index.get(hardware._driver_words(name)) is find_by_driver_name(name)


# --- the numbers ---------------------------------------------------------------------------------


@cases(("name", "precision", "sparse_tflops"), SPARSE)
def test_peaks_do_not_include_sparsity(name, precision, sparse_tflops):
    assert peak_flops_per_s(name, precision) == pytest.approx(sparse_tflops * 1e12 / 2, rel=0.005)


@cases(
    ("name", "megahertz"),
    [
        ("NVIDIA H100 80GB HBM3", 1830),
        ("Tesla V100-SXM2-16GB", 1530),
        ("NVIDIA GeForce RTX 3090", 1695),
        ("NVIDIA GeForce RTX 5090", 2407),
    ],
)
def test_clock_of_the_peak_is_the_boost_clock_of_the_datasheet(name, megahertz):
    assert peak_clock_hz(name) == pytest.approx(megahertz * 1e6, rel=0.004)
    assert peak_clock_hz(f"{name} MIG 1g.10gb") == peak_clock_hz(name)
    assert peak_clock_hz("NVIDIA B200") is None
    assert peak_clock_hz("AnyGPU 9000") is None


@cases("row", ROWS)
def test_every_hardware_row_has_a_source_and_plausible_numbers(row):
    assert row.source.title
    assert row.source.url.startswith("https://")
    assert row.source.evidence in {"read", "quoted", "unconfirmed"}
    assert row.architecture in SENSORS
    assert set(row.flops_per_s) <= set(PRECISIONS)
    assert all(1e12 <= rate <= 2e16 for rate in row.flops_per_s.values())
    assert row.memory_bytes_per_s is None or 0.1e12 <= row.memory_bytes_per_s <= 20e12
    assert row.memory_bytes is None or 8 * 2**30 <= row.memory_bytes <= 512 * 2**30
    assert row.tdp_w is None or 50 <= row.tdp_w <= 1500


@cases("row", ROWS)
def test_peak_rate_doubles_when_the_number_of_bits_is_halved(row):
    rate = row.flops_per_s
    # A sparse value in this table would give a ratio of 1 or 4.  Below FP8, the ratios differ between vendors.
    for wide, narrow in [("bf16", "fp8"), ("fp16", "fp8")]:
        if wide in rate and narrow in rate:
            assert rate[narrow] / rate[wide] == pytest.approx(2, rel=0.03)
    if "tf32" in rate:
        assert rate["tf32"] <= 0.51 * rate["bf16"]
    if "fp4" in rate:
        assert rate["fp4"] >= 1.99 * rate["fp8"]
    if "bf16" in rate and row.memory_bytes_per_s:
        assert 20 <= rate["bf16"] / row.memory_bytes_per_s <= 1000, "FLOP per byte"


@cases("row", ROWS)
def test_bf16_peak_is_the_fp16_peak_since_ampere_and_absent_before(row):
    if row.architecture in {"Pascal", "Volta", "Turing"}:
        assert "bf16" not in row.flops_per_s
    elif row.flops_per_s and row.architecture != "CDNA":
        assert row.flops_per_s["bf16"] == row.flops_per_s["fp16"]


# --- power sensors -------------------------------------------------------------------------------


@cases(
    ("name", "milliseconds", "duty", "power_usage"),
    [
        ("NVIDIA H100 80GB HBM3", (100, 25), 0.25, "1-s mean"),
        ("NVIDIA A100-SXM4-80GB", (100, 25), 0.25, "instant"),
        ("NVIDIA A10", (100, 100), 1.0, "1-s mean"),  # is Ampere as well, but only the A100 returns instant power
        ("Tesla V100-SXM2-16GB", (20, 10), 0.5, "instant"),
        ("NVIDIA B200", (None, None), None, "1-s mean"),
    ],
)
def test_sensor_of_a_device_follows_from_its_generation(name, milliseconds, duty, power_usage):
    sensor = find_by_driver_name(name).sensor

    assert (sensor.update_s, sensor.window_s) == tuple(value and value / 1e3 for value in milliseconds)
    assert (sensor.duty, sensor.power_usage, sensor.lag_s, sensor.counter) == (duty, power_usage, None, True)


def test_facts_of_single_boards_and_generations_are_kept():
    assert {name for name, sensor in SENSORS.items() if not sensor.counter} == {"Kepler", "Maxwell", "Pascal"}
    assert find_by_driver_name("AMD Instinct MI300X").sensor.power_usage is None
    assert find_by_driver_name("Quadro RTX 8000").sensor.duty == pytest.approx(0.2)
    # boards that were compared with a meter
    assert find_by_driver_name("NVIDIA A100-PCIE-40GB").gain_measured == (-0.058, -0.055)
    assert find_by_driver_name("NVIDIA GeForce RTX 3090").gain_measured == (-0.056, -0.040)
    assert find_by_driver_name("NVIDIA H100 80GB HBM3").gain_measured is None
    assert "one of the two dies" in find_by_driver_name("AMD Instinct MI250X").note
    assert [find_by_driver_name(name).source.evidence for name in ("NVIDIA GB10", "NVIDIA H20")] == ["unconfirmed"] * 2


def test_every_sensor_has_a_source_and_a_plausible_tick_share():
    for sensor in [*SENSORS.values(), *(row.sensor for row in ROWS)]:
        assert sensor.source
        assert sensor.gain_error == 0.05
        assert sensor.duty is None or 0 < sensor.duty <= 1


# --- the page ------------------------------------------------------------------------------------


def cell(value, divisor=1.0):
    return "" if value is None else f"{value / divisor:.6g}"


def devices():
    yield "| device | architecture | GiB | GB/s | W | 16 bits | FP8 |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for row in ROWS:
        rate = row.flops_per_s.get("bf16") or row.flops_per_s.get("fp16")
        mark = "?" * (row.source.evidence == "unconfirmed" and rate is not None)
        yield (
            f"| {row.names[0]} | {row.architecture} | {cell(row.memory_bytes, 2**30)} | "
            f"{cell(row.memory_bytes_per_s, 1e9)} | {cell(row.tdp_w)} | {cell(rate, 1e12)}{mark} | "
            f"{cell(row.flops_per_s.get('fp8'), 1e12)} |"
        )


def sensors():
    def milliseconds(value):
        return "unknown" if value is None else f"{value * 1e3:g} ms"

    yield "| architecture | new value every | of which measured | `nvmlDeviceGetPowerUsage` | rise | energy counter |"
    yield "|---|---|---|---|---|---|"
    notes = {}
    for name, sensor in SENSORS.items():
        rise = "unknown" if sensor.rise_s is None else " to ".join(milliseconds(value) for value in sensor.rise_s)
        yield (
            f"| {name} | {milliseconds(sensor.update_s)} | {milliseconds(sensor.window_s)} | "
            f"{sensor.power_usage or 'unknown'} | {rise} | {'yes' if sensor.counter else 'no'} |"
        )
        notes.setdefault(f"{sensor.note.removesuffix('.')} ({sensor.source}).", []).append(name)
    yield ""
    yield from (f"- **{', '.join(names)}**: {note}" for note, names in notes.items())


def with_tables(page):
    """Return the page with new tables between its marks."""
    for mark, lines in {"devices": devices(), "sensors": sensors()}.items():
        before, _, rest = page.partition(f"<!-- {mark} -->\n")
        _, _, after = rest.partition(f"<!-- end of {mark} -->\n")
        page = f"{before}<!-- {mark} -->\n" + "\n".join(lines) + f"\n<!-- end of {mark} -->\n{after}"
    return page


def test_hardware_page_has_the_tables_of_the_code():
    page = PAGE.read_text()

    assert page == with_tables(page), "run: python tests/unit/test_hardware.py"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
