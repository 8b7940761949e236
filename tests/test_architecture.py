"""Layers: imports only point down, and importing the package is cheap."""

import ast
import importlib
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import effllm

PACKAGE = Path(effllm.__file__).parent
MODULES = {
    ".".join(("effllm", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# From the bottom to the top; a module may import from the lines above its own.
FLOORS = """
0       agents  aggregation  energy  events  health  network  records  runs  server  store  training
0.1     records.clock  records.counters  records.energy
0.2     records.rank
0.3     records.job  records.wire
0.5     event_limit  runs.own_files  timeline
0.6     known_sensors  network.descriptors  network.intake  network.monitor  network.rejections  network.secret
0.7     network.connections  network.curve
0.8     network.peer_admission
1.0     devices  energy.tick_clock  hardware  health.clock
1.0     metrics.ratios  metrics.table
1.0.0.1 metrics.contract  metrics.energy  metrics.evaluation  metrics.goodput  metrics.health
1.0.0.2 metrics.throughput
1.0.0.3 metrics
1.0     network.interface  network.transport
1.0     runs.plain_text  runs.redaction  runs.run_lock  runs.runfolder  spawn  switches  training.facts
1.0     training.ownership  training.shared_memory  training.without_metrics
1.0.1   agents.flight_recorder  agents.trainer_process  aggregation.pacing  config  health.diagnosis  health.robust
1.0.1   node_power.credentials  node_power.perf_event  node_power.reader  node_power.redfish_records
1.0.1   runs.provenance
1.0.0.5 setting_values
1.0.2   place
1.0.1.5 training.generations
1.0.1   training.board  training.counts  training.declared  training.phases  training.ptracer  training.ring
1.0.2   health.waste  runs.folder_size
1.0.2   health.change_point  node_power.https  node_power.rapl_counters  runs.journal  runs.text_log  runs.unkept
1.0.3   health.slowdown  network.listening  node_power.redfish_sources
1.0.4   energy.lag_evidence  energy.power_spread  health.straggler_text  node_power.*
1.0.3   energy.readings  energy.tick_period
1.0.5   energy.cross_check  energy.sensor_timing  energy.tick_energy
1.0.6   energy.aliasing  energy.edge_levels
1.0.7   energy.counter_steps
1.1     agents.log  agents.trainer  devices._nvml_call  devices._nvml_identity  energy.device_energy  health.hang
1.1     health.lost_agents  measurable  network.peers  node_power  runs.summary_text
1.1     devices._amd_counter  devices._amd_library
1.2     devices._amd_readings
1.2     agents.events  agents.iteration_values  agents.series
1.2     devices._nvml_chip  devices._nvml_gpm  devices._nvml_power  devices._nvml_watch
1.2     energy.calibration  health.stall_text  runs.window_text
1.2.0.5 agents.notices  agents.window  runs.closing_text
1.2.1   devices._amd_identity  devices._nvml_slices
1.2.2   devices.*
1.2.2.5 aggregation.columns  aggregation.gathered
1.2.3   aggregation.goodput_tiles  aggregation.rows  energy.energy_account  energy.power_scope
1.2.3.1 aggregation.goodput_attempt
1.2.3.2 aggregation.goodput
1.2.4   aggregation.merged
1.2.5   aggregation.window_energy
1.3     aggregation.account  aggregation.joining
1.3.1   agents.connection  health.outliers  health.slowest
1.3.2   health.evidence
1.3.2.5 health.straggler_reasons
1.3.3   health.stragglers
1.4     aggregation.ledger
1.4.5   aggregation.job_facts  aggregation.presence
1.5     aggregation.roster  aggregation.spread  health.losses
1.6     aggregation.reporting  health.stalls
1.7     health.straggler_watch  health.energy_watch
1.8     aggregation.event_log
1.8     aggregation.open_windows
1.9     aggregation.closed_windows
2.0     agents.sampler  aggregation.aggregator  aggregation.simulation  network.discovery
2.0     sinks  training.device_time  training.recorder  training.torch_profile
2.1     agents.track  preflight  sinks.*  store.*  training.watched_recorder
2.1     server.acknowledgement
2.2     agents.gpu_energy  agents.rank_devices
2.3     agents.inspection  agents.measuring
2.4     agents.inspection_child  agents.messages
2.5     aggregation.orders  server.writer
2.6     server.*
3.0     aggregation.server
3.1     agents.aggregator_child
3.2     agents.children
3.3     agents.conversation
3.4     agents.agent
3.9     training.address  training.counted  training.values
4.0     training.session
4.0.1   training.lifecycle
4.1     collector
4.1.1   loop
4.1.1   inference
4.1.2   performance_monitor
4.2     hooks._batch  hooks._imports  hooks._late  hooks._parameters  hooks._wrap  hooks.megatron  profiling.record
4.2     profiling.torch_child
4.3     hooks  hooks._steps  profiling.estimates  profiling.load  profiling.nvml_facts
4.4     hooks._trainer_layout  hooks._batches  hooks._modes  hooks._unmeasured  profiling.watching
4.4.1   hooks._rounds
4.5     profiling.*
5       analysis  analysis.*  hooks.*  profiling  serving  survey
5.1     hooks.trl
6       attach
7.0     effllm
7.0.1   commands.simulate_ranks
7.0.2   commands.simulate_run
7.1     commands  commands.*  efficientllm_metrics
7.2     commands.app
7.3     cli
7.4     __main__
"""
ROOMS = [(line.split()[0], pattern) for line in FLOORS.strip().splitlines() for pattern in line.split()[1:]]

# What the training process imports: the standard library alone, and it must not fail.
IN_TRAINING = [
    "effllm",
    "effllm.collector",
    "effllm.loop",
    "effllm.inference",
    "effllm.training.recorder",
    "effllm.training.watched_recorder",
    "effllm.training.ring",
    "effllm.config",
    "effllm.place",
    "effllm.network.secret",
    "effllm.network.discovery",
    "effllm.attach",
    "effllm.hooks",
]


def floor(module):
    """Return the floor of a module as numbers; an exact name goes before a pattern."""
    short = module.removeprefix("effllm.")
    named = [number for number, pattern in ROOMS if pattern == short]
    matched = named or [number for number, pattern in ROOMS if fnmatchcase(short, pattern)]
    return tuple(map(int, matched[0].split("."))) if matched else None


def imports(module):
    """Yield the modules of effllm that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "effllm")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names if (node.module or "").split(".")[0] == "effllm" else ():
                inner = f"{node.module}.{alias.name}"
                if (node.module, alias.name) != ("effllm", "__version__"):
                    yield inner if inner in MODULES else node.module


def test_agent_does_not_import_the_aggregator():
    heavy = ["numpy", "tensorboard", "effllm.aggregation.server", "effllm.aggregation.account"]
    code = f"import sys, effllm.agents.agent; print(set({heavy}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"


def test_modules_and_imports_are_found():
    assert {"effllm", "effllm.records.rank", "effllm.devices", "effllm.devices.nvml"} <= set(MODULES)
    assert "effllm.records.rank" in set(imports("effllm.aggregation.account"))
    assert "effllm.metrics" in set(imports("effllm.aggregation.reporting")), "from effllm import metrics"


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_only_from_lower_floors(module):
    own = floor(module)
    assert own is not None, f"{module} is not in the table of floors"

    for other in set(imports(module)):
        assert floor(other) < own, f"{module} imports {other}, which does not lie below it"


def names_of_a_module_imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def attributes(path):
    return {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}


ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


@pytest.mark.parametrize("module", MODULES)
def test_only_switches_reads_the_environment(module):
    used = attributes(MODULES[module]) & {f"os.{name}" for name in ENVIRONMENT}
    used |= {f"{a}.{b}" for a, b in names_of_a_module_imported(MODULES[module]) if a == "os" and b in ENVIRONMENT}

    assert used == ({"os.environ"} if module == "effllm.switches" else set())


@pytest.mark.parametrize("module", MODULES)
def test_no_module_has_a_catch_all_name(module):
    words = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "base", "core"}

    assert not set(module.split(".")) & words


def modules_imported_by(module):
    """Return what a fresh interpreter imports with a module, without those that are imported at its start."""
    program = f"import sys; had = set(sys.modules); import {module}; print(*(set(sys.modules) - had))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize("module", IN_TRAINING)
def test_training_process_imports_only_the_standard_library(module):
    tops = {name.split(".")[0] for name in modules_imported_by(module)}

    assert tops - {"effllm"} <= sys.stdlib_module_names


def test_importing_the_package_imports_none_of_its_modules():
    assert {name for name in modules_imported_by("effllm") if name.startswith("effllm.")} == set()


def test_collector_imports_no_records_and_no_sockets():
    assert not {"effllm.records.rank", "effllm.network.transport", "zmq", "msgspec"} & modules_imported_by(
        "effllm.collector"
    )


def names():
    return sorted(effllm._HOMES)


def home_of(name):
    # The callback is a class of transformers, which may be missing.
    if name == "EfficientLLMCallback":
        pytest.importorskip("effllm.hooks.transformers", exc_type=ImportError)
    return importlib.import_module(effllm._HOMES[name])


@pytest.mark.parametrize("name", names())
def test_public_names_can_be_imported_from_both_packages(name):
    home = home_of(name)
    original = importlib.import_module("effllm.efficientllm_metrics")

    assert getattr(effllm, name) is getattr(original, name) is getattr(home, name)


def test_the_public_names_are_those_that_dir_shows():
    original = importlib.import_module("effllm.efficientllm_metrics")

    assert sorted(dir(effllm)) == sorted(effllm.__all__)
    assert sorted(dir(original)) == sorted(original.__all__) == sorted(set(effllm.__all__) - {"__version__"})
    assert len(set(effllm.__all__)) == len(effllm.__all__)


@pytest.mark.parametrize("package", ["effllm", "effllm.efficientllm_metrics"])
def test_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="has no attribute 'metrics_manager'"):
        importlib.import_module(package).metrics_manager  # noqa: B018 - the access is the test
