"""Hostile bytes for every reader of untrusted data; tests/fuzz.py checks the results."""

import fuzz
import pytest
from builders import row
from cases import cases
from hypothesis import given
from hypothesis import strategies as st

from effllm.network.transport import FrameError, decode_from_agent, encode
from effllm.records.wire import MAX_ROWS, Reports

CASES = [(target, path) for target in fuzz.TARGETS for path in fuzz.corpus(target)]


@pytest.mark.fault("hostile-frames")
@cases(("target", "path"), CASES)
def test_corpus_is_handled(target, path):
    fuzz.TARGETS[target](path.read_bytes())


def of_corpus(target):
    """Return a strategy of corpus files that are truncated and have replaced bytes."""

    def damaged(data, damages, length):
        changed = bytearray(data[: int(length * len(data)) + 1])
        for where, byte in damages:
            if changed:
                changed[int(where * (len(changed) - 1))] = byte
        return bytes(changed)

    damages = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4)
    files = st.sampled_from([path.read_bytes() for path in fuzz.corpus(target)])
    return st.builds(damaged, files, damages, st.sampled_from([1.0, 1.0, 0.5, 0.9]))


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_damaged_inputs_of_the_corpus_raise_no_unexpected_error(target):
    @given(of_corpus(target) | st.binary(max_size=300))
    def try_it(data):
        fuzz.TARGETS[target](data)

    try_it()


#: Valid but unusual frames: an aggregator accepts them; they change only the values of their rank.
POSSIBLE = """
    all-gauges all-times-zero device-twice device-unknown empty-reports energy-of-next-to-nothing facts-nan
    gauge-negative good-beat good-bye good-hello good-note good-own-times good-reports
    good-stack good-supersede groups largest-amounts largest-beat largest-flops largest-own-times largest-profile
    log-interval-zero loss-1_7e308 memory-zero note-escapes note-long offset-negative
    parameters-zero profile rank-of-2-61 row-reset-and-final smallest-amounts stalled-for-ever start_time_s--1e30
    stated-gpus world-of-2-61
"""


def is_a_message(path):
    try:
        decode_from_agent(path.read_bytes())
    except FrameError:
        return False
    return True


def test_only_known_frames_of_the_corpus_are_accepted():
    assert {path.name for path in fuzz.corpus("frames") if is_a_message(path)} == set(POSSIBLE.split())


def test_frame_with_too_many_reports_is_rejected():
    with pytest.raises(FrameError, match=f"length <= {MAX_ROWS}"):
        decode_from_agent(encode(Reports((row(devices=()),) * (MAX_ROWS + 1))))
