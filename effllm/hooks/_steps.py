"""The interface between hooks and metrics; only the steps of the owner are counted (`effllm.trainer.ownership`)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from effllm.config.place import Place, read_place
from effllm.config.switches import process_environ
from effllm.hooks._wrap import Call, Guard, around
from effllm.trainer import ownership
from effllm.trainer.collector import get_metrics_collector, initialize_efficientllm_metrics
from effllm.trainer.recorder import Recorder
from effllm.trainer.value_buffer import PENDING


class Steps:
    """The steps of one framework in this process; ``style`` is its word for an iteration, ``Iteration`` or ``Step``."""

    # The last number of parameters that a hook has declared, perhaps for an earlier training.  Hooks may replace this
    # number, but not a number that the training script has declared.
    _parameters: Any = None
    _model: Any = None  # name of the model that a hook declared last

    def __init__(self, level: int, name: str, style: str = "Iteration") -> None:
        self.level, self.name, self.style = level, name, style
        self.num_open_phases = 0  # number of running calls that `wrap_as_phase` counts as phases

    @property
    def is_owner(self) -> bool:
        return ownership.holds(self.level, self.name)

    @property
    def recorder(self) -> Recorder | None:
        """The recorder, while these steps are counted and metrics are enabled."""
        return get_metrics_collector().recorder if self.is_owner else None

    @property
    def _phase_recorder(self) -> Recorder | None:
        """The recorder of marked phases: also beside a loop that calls effllm itself, which may mark none."""
        return get_metrics_collector().recorder if self.is_owner or ownership.is_explicit() else None

    def claim(self) -> bool:
        """Become the owner, if no other is as near to the user or nearer; return whether these steps are counted."""
        return ownership.claim(self.level, self.name)

    @property
    def may_declare_parameters(self) -> bool:
        """Whether a hook may declare the number of parameters; ``False`` if the training script has declared it."""
        collector = get_metrics_collector()
        return not collector.declared.has_parameters or collector.declared.facts.parameters is Steps._parameters

    def declare_parameters(self, share: Mapping[str, int]) -> None:
        """Declare parameters that became known after the start of training."""
        collector = get_metrics_collector()
        if self.is_owner and collector.is_collecting and self.may_declare_parameters:
            initialize_efficientllm_metrics(parameter_share=share)
            Steps._parameters = collector.declared.facts.parameters

    def begin_training(
        self,
        *,
        parameter_share: Mapping[str, int] | None = None,
        first_iteration: int | None = None,
        total_iterations: int | None = None,
        flops_per_token: float | None = None,
        facts: Mapping[str, Any] | None = None,
        is_numbered: bool = True,
        declared: Mapping[str, Any] | None = None,
    ) -> bool:
        """Become the owner and start the metrics; ``False`` if another framework is the owner, or metrics are off.

        ``declared`` has fields of `RankFacts`; for the other arguments see `initialize_efficientllm_metrics`.
        Earlier declarations are kept.
        """
        if not self.claim():
            return False
        collector = get_metrics_collector()
        if not self.may_declare_parameters:
            parameter_share = None
        if not collector.is_collecting:  # an earlier training may have left declarations
            collector.declared.forget_training()
        collector.declared.set(style=self.style, **(declared or {}))
        run = collector.declared.facts.run
        # Whether the model's name is from a hook: of an earlier training, or of requests.
        is_from_hook = "model" in run and (collector.declared.facts.serves_requests or run["model"] == Steps._model)
        if is_from_hook:
            collector.declared.set(run={name: value for name, value in run.items() if name != "model"})
        model = None if is_from_hook else run.get("model")  # a name from the training script has priority
        Steps._model = None if model else (facts or {}).get("model")
        initialize_efficientllm_metrics(
            parameter_share=parameter_share,
            first_iteration=first_iteration or 0,
            is_numbered=None if first_iteration is None else is_numbered,
            total_iterations=total_iterations,
            flops_per_token=flops_per_token,
            facts={"framework": self.name, **(facts or {}), **({"model": model} if model else {})},
            place=place(),
        )
        if parameter_share is not None:
            Steps._parameters = collector.declared.facts.parameters
        return collector.is_collecting

    def start_step(self) -> None:
        if (recorder := self.recorder) is not None:
            recorder.start()

    def record_positions(self, positions: int) -> None:
        """Record the positions of a micro-batch, with padding."""
        if positions and (record := getattr(self.recorder, "record_positions", None)) is not None:  # with CUDA
            record(positions)

    def end_step(
        self,
        tokens_processed: int = 0,
        samples: int = 0,
        tokens: int | None = None,
        tokens_loss: int = 0,
        *,
        at_ns: int | None = None,
    ) -> None:
        """Record the end of a step with this rank's counts, as `MetricsCollector.record_iteration_end`.

        If the counts become known after the end, ``at_ns`` is the time of the end on the monotonic clock.
        """
        recorder = self.recorder
        if recorder is None:
            return
        if at_ns is None:
            recorder.end(tokens_processed, samples, tokens, tokens_loss)
        else:
            recorder.end(tokens_processed, samples, tokens, tokens_loss, _now=lambda: at_ns)

    def end_counted(self, samples: int = 0) -> None:
        """Record the end of a step with the counts of `effllm.count`, for a hook that cannot count tokens.

        ``samples`` is the hook's own count; it is used if `effllm.count` was not given samples.
        """
        if self.is_owner:
            get_metrics_collector().end_counted(samples)

    def add_data_wait(self, spent_ns: int) -> None:
        """Count this time of the running step as data wait."""
        if (recorder := self.recorder) is not None:
            recorder.add_data_wait(spent_ns)

    def add_late_counts(self, *, samples: int = 0, tokens: int = 0, tokens_loss: int = 0) -> None:
        """Add counts that became known after the end of their step."""
        if (recorder := self.recorder) is not None:
            recorder.add_late_counts(samples, tokens, tokens_loss)

    def add_late_facts(
        self,
        *,
        flops_per_token: float | None = None,
        hardware_flops_per_token: float | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Add arguments of `begin_training` that became known after its call; ``None`` adds nothing."""
        if self.is_owner and get_metrics_collector().is_collecting:
            initialize_efficientllm_metrics(
                flops_per_token=flops_per_token, hardware_flops_per_token=hardware_flops_per_token, facts=facts
            )

    def phase_start(self, name: str) -> None:
        """Begin a phase outside of iterations: ``evaluation``, ``checkpoint`` or ``other``."""
        if (recorder := self._phase_recorder) is not None:
            recorder.phase_start(name)

    def phase_end(self) -> None:
        if (recorder := self._phase_recorder) is not None:
            recorder.phase_end()

    def wrap_as_phase(
        self, holder: Any, name: str, phase: str, guard: Guard, is_phase: Callable[[Call], Any] = lambda _call: True
    ) -> bool:
        """Wrap a function as `around` does, so that each call is a phase; ``False`` if ``holder`` has no such function.

        ``is_phase`` is called at the start of each `Call`, and returns whether it is a phase.
        """

        def start(call: Call) -> tuple[Recorder | None] | None:  # None: no phase; else the recorder, None without one
            if not is_phase(call):
                return None
            self.num_open_phases += 1
            if (recorder := self._phase_recorder) is not None:
                recorder.phase_start(phase)
            return (recorder,)

        def end(started: tuple[Recorder | None] | None, *_: Any) -> None:
            if started is not None:
                self.num_open_phases -= 1
                if started[0] is not None:
                    started[0].phase_end()  # without effect if the metrics of this recorder have ended

        return around(holder, name, guard, before=start, after=end, failed=end)

    def record_loss(self, iteration: int, loss: float | None) -> dict[str, float]:
        """Record the loss of the last step, and return the newest values of the job."""
        return get_metrics_collector().log_own(iteration, loss) if self.is_owner else {}

    def values_for_logs(self) -> dict[str, float]:
        """Return the newest values for the framework's logs; empty if a sink writes into the user's tracker."""
        return get_metrics_collector().values_for_logs() if self.is_owner else {}

    def record_figures(self, figures: Mapping[str, Any]) -> None:
        """Record numbers above 0 that the framework has logged, by names in `framework_figures`; only on rank 0."""
        if not self.is_owner or rank() != 0:
            return
        for name, value in figures.items():
            number = float(value) if type(value) in (int, float) else math.nan
            if 0 < number < math.inf:
                PENDING.add_value(name, number)

    def finish(self, status: str = "completed") -> None:
        """End the metrics, and remove this framework as the owner."""
        if self.is_owner:
            get_metrics_collector().stop_collection(status)
            ownership.release(self.level, self.name)


_wait_listeners: list[Any] = []
_batch_listeners: list[Any] = []


def listen_to_waits(listener: Any) -> None:
    """Pass the data waits in torch's DataLoader to ``listener.add_data_wait``, for a hook that cannot measure them."""
    if listener not in _wait_listeners:
        _wait_listeners.append(listener)


def listen_to_batches(listener: Any) -> None:
    """Pass the batches of torch's DataLoader, and the begins of backward passes, to a listener."""
    if listener not in _batch_listeners:
        _batch_listeners.append(listener)


def pass_data_wait(spent_ns: int) -> bool:
    """Pass a data wait to the hooks; return whether any hook measures steps."""
    for listener in _wait_listeners:
        listener.add_data_wait(spent_ns)  # only the owner of the iterations counts the wait
    return bool(_wait_listeners)


def pass_batch(batch: Any, loader: Any) -> None:
    """Pass a batch of an iterator of torch's DataLoader to the hooks that count batches; ``None`` if it has no more."""
    for listener in _batch_listeners:
        listener.batch_fetched(batch, loader)


def pass_backward() -> None:
    for listener in _batch_listeners:
        listener.backward_begins()


def version(package: str) -> str:
    """Return the version of an imported package, or "unknown"; ``package`` may also be the name of a module in it."""
    return getattr(sys.modules.get(package.split(".")[0]), "__version__", None) or "unknown"


def rank() -> int:
    return (place() or read_place(process_environ())).rank


def place() -> Place | None:
    """Return the place of this rank (rank, world_size, ...), or ``None`` if the environment has the right place.

    A spawned process gets only its rank, and a container may set WORLD_SIZE for a single process.
    """
    environ = process_environ()
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    stated = read_place(environ)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        has_launcher = (  # a container may set the variables of torchrun, but not these two
            stated.launcher != "torchrun"
            or "TORCHELASTIC_RUN_ID" in environ
            or "TORCHELASTIC_USE_AGENT_STORE" in environ
        )
        return None if stated.world_size == 1 or has_launcher else Place(restart_id=stated.restart_id)
    own_rank, world_size = distributed.get_rank(), distributed.get_world_size()
    if (own_rank, world_size) == (stated.rank, stated.world_size) and (stated.master_addr or world_size == 1):
        return None
    address, port = _store_address(distributed)
    address = address or environ.get("MASTER_ADDR", "")
    is_one_host = world_size == 1 or address in ("127.0.0.1", "localhost", "::1")
    return Place(
        rank=own_rank,
        local_rank=int(environ.get("LOCAL_RANK", "") or own_rank),
        world_size=world_size,
        local_world_size=world_size if is_one_host else 0,
        master_addr=address,
        master_port=port or int(environ.get("MASTER_PORT", "") or 0),
        launcher="torch.distributed",
        restart_id=stated.restart_id,
    )


def _store_address(distributed: Any) -> tuple[str, int]:
    """Return host and port of the store of torch's process group; with ``tcp://`` the environment lacks them."""
    get_store = getattr(getattr(distributed, "distributed_c10d", None), "_get_default_store", None)
    try:
        store: Any = get_store() if get_store is not None else None
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return str(store.host), int(store.port)
    except (AttributeError, RuntimeError, ValueError):
        return "", 0  # a store without an address, such as file://
