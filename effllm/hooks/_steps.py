"""What a hook tells of its framework's loop; only the one that owns the count of this process is heard.

Standard library alone: this lives in the training process.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from effllm.collector import get_metrics_collector, initialize_efficientllm_metrics
from effllm.config import Place, read_place
from effllm.switches import this_process
from effllm.training import ownership


class Steps:
    """The steps of one framework in this process.

    Args:
        level: of `ownership`.
        name: of the framework, as run.json says it.
        style: ``Step`` where its people speak of steps.
    """

    _parameters: Any = None  # what a hook said last, of an earlier training perhaps, and a hook may replace

    def __init__(self, level: int, name: str, style: str = "Iteration") -> None:
        self.level, self.name, self.style = level, name, style

    @property
    def is_owner(self) -> bool:
        """Whether it is this framework's steps that count."""
        return ownership.holds(self.level, self.name)

    @property
    def may_say_parameters(self) -> bool:
        """Whether the training script has not said how many parameters the model has."""
        collector = get_metrics_collector()
        return not collector.has_parameters or collector._facts["parameters"] is Steps._parameters

    def say_parameters(self, share: Mapping[str, int]) -> None:
        """Say them, where they became known when training had begun."""
        collector = get_metrics_collector()
        if self.is_owner and collector.is_collecting and self.may_say_parameters:
            initialize_efficientllm_metrics(parameter_share=share)
            Steps._parameters = collector._facts["parameters"]

    def begin(
        self,
        *,
        parameters: int | None = None,
        parameter_share: Mapping[str, int] | None = None,
        first_iteration: int | None = None,
        total_iterations: int | None = None,
        flops_per_token: float | None = None,
        hardware_flops_per_token: float | None = None,
        facts: Mapping[str, Any] | None = None,
        is_numbered: bool = True,
    ) -> bool:
        """Claim the count and start the metrics of this rank; ``False`` where another counts, or metrics are off.

        The arguments are those of `initialize_efficientllm_metrics`; what its caller said before stays.
        """
        if not ownership.claim(self.level, self.name):
            return False
        collector = get_metrics_collector()
        if not self.may_say_parameters:
            parameters = parameter_share = None
        if not collector.is_collecting:  # an earlier training in this process may have left its own
            collector._facts.update(dict.fromkeys(("total_iterations", "flops_per_token", "hardware_flops_per_token")))
            collector._facts["first_iteration"] = 0
            collector._facts["is_numbered"] = False
            for fact in ("evaluation_in_iterations", "iterations_not_measured"):
                collector._facts["run"].pop(fact, None)
        initialize_efficientllm_metrics(
            parameters,
            parameter_share=parameter_share,
            first_iteration=first_iteration or 0,
            is_numbered=None if first_iteration is None else is_numbered,
            total_iterations=total_iterations,
            flops_per_token=flops_per_token,
            hardware_flops_per_token=hardware_flops_per_token,
            facts={"style": self.style, "framework": self.name, **(facts or {})},
            place=place(),
        )
        if parameters is not None or parameter_share is not None:
            Steps._parameters = collector._facts["parameters"]
        return collector.is_collecting

    def start(self) -> None:
        """Stamp the start of a step."""
        recorder = get_metrics_collector().recorder
        if recorder is not None and self.is_owner:
            recorder.start()

    def end(
        self,
        tokens_processed: int = 0,
        samples: int = 0,
        tokens: int | None = None,
        tokens_loss: int = 0,
        *,
        at_ns: int | None = None,
    ) -> None:
        """Stamp its end, with this rank's share of what was in it, as `MetricsCollector.record_iteration_end`.

        ``at_ns`` is when it was, by the monotonic clock, where the counts come later than the end.
        """
        recorder = get_metrics_collector().recorder
        if recorder is None or not self.is_owner:
            return
        if at_ns is None:
            recorder.end(tokens_processed, samples, tokens, tokens_loss)
        else:
            recorder.end(tokens_processed, samples, tokens, tokens_loss, _now=lambda: at_ns)

    def end_counted(self, samples: int = 0) -> None:
        """Stamp its end with what the loop gave to `effllm.count`, where the hook sees no tokens.

        ``samples`` are what the hook sees, for a loop that gives none.
        """
        if self.is_owner:
            get_metrics_collector().end_counted(samples)

    def waited(self, spent_ns: int) -> None:
        """Count a stretch of the running step as waiting for data."""
        recorder = get_metrics_collector().recorder
        if recorder is not None and self.is_owner:
            recorder.waited(spent_ns)

    def add(self, *, samples: int = 0, tokens: int = 0, tokens_loss: int = 0) -> None:
        """Add counts that became known when their step had ended."""
        recorder = get_metrics_collector().recorder
        if recorder is not None and self.is_owner:
            recorder.add(samples, tokens, tokens_loss)

    def learn(
        self,
        *,
        flops_per_token: float | None = None,
        hardware_flops_per_token: float | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Add what only a running step shows to what `begin` said; ``None`` adds nothing."""
        if self.is_owner and get_metrics_collector().is_collecting:
            initialize_efficientllm_metrics(
                flops_per_token=flops_per_token, hardware_flops_per_token=hardware_flops_per_token, facts=facts
            )

    def phase_start(self, name: str) -> None:
        """Begin a stretch that is not iteration: ``evaluation``, ``checkpoint`` or ``other``."""
        recorder = get_metrics_collector().recorder
        if recorder is not None and self.is_owner:
            recorder.phase_start(name)

    def phase_end(self) -> None:
        """End the stretch that began last."""
        recorder = get_metrics_collector().recorder
        if recorder is not None and self.is_owner:
            recorder.phase_end()

    def may_evaluate(self) -> None:
        """Report an evaluation as what this rank does; whether it is one, `evaluated` decides."""
        recorder = get_metrics_collector().recorder
        if recorder is not None and self.is_owner:
            recorder.may_evaluate()

    def evaluated(self, start_ns: int, end_ns: int) -> None:
        """Take a stretch out of the running iteration as evaluation, by the monotonic clock, when it is over."""
        recorder = get_metrics_collector().recorder
        if recorder is not None and self.is_owner:
            recorder.evaluated(start_ns, end_ns)

    def generated(self, tokens: int, time_ns: int, prompt_tokens: int = 0) -> None:
        """Add what this rank generated, and the time of it, to IT; its time stays in AL. Whoever owns the count."""
        recorder = get_metrics_collector().recorder
        if recorder is not None:
            recorder.generated(tokens, time_ns, prompt_tokens)

    def generation_start(self) -> None:
        """Begin a generation inside of training: it makes IT, and neither AL nor T has its time.

        What other hooks (of `generate`, of vLLM) see inside is not counted again.
        """
        recorder = get_metrics_collector().recorder
        if recorder is not None:
            recorder.generation_start(is_phase=self.is_owner)

    def generation_end(self, tokens: int | None = None, prompt_tokens: int = 0) -> None:
        """End it, with this rank's share of its tokens; those that hooks saw inside where they are not given."""
        recorder = get_metrics_collector().recorder
        if recorder is not None:
            recorder.generation_end(tokens, prompt_tokens)

    def loss(self, iteration: int, loss: float | None) -> dict[str, float]:
        """Record the loss of the step that ended last, a number, and return the newest values of the job."""
        return get_metrics_collector().log_own(iteration, loss) if self.is_owner else {}

    def finish(self, status: str = "completed") -> None:
        """End the metrics, and give up the count."""
        if self.is_owner:
            get_metrics_collector().stop_collection(status)
            ownership.release(self.level, self.name)


def place() -> Place | None:
    """Return where this rank stands where torch knows that better than the environment; else ``None``.

    Processes that were spawned know their rank alone; and a container may have set WORLD_SIZE for a single one.
    """
    environ = this_process()
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    told = read_place(environ)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        is_launched = (
            told.launcher != "torchrun" or "TORCHELASTIC_RUN_ID" in environ or "TORCHELASTIC_USE_AGENT_STORE" in environ
        )
        return None if told.world_size == 1 or is_launched else Place(run_id=told.run_id)
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    if (rank, world_size) == (told.rank, told.world_size) and (told.master_addr or world_size == 1):
        return None
    address, port = _store_address(distributed)
    address = address or environ.get("MASTER_ADDR", "")
    is_one_host = world_size == 1 or address in ("127.0.0.1", "localhost", "::1")
    return Place(
        rank=rank,
        local_rank=int(environ.get("LOCAL_RANK", "") or rank),
        world_size=world_size,
        local_world_size=world_size if is_one_host else 0,
        master_addr=address,
        master_port=port or int(environ.get("MASTER_PORT", "") or 0),
        launcher="torch.distributed",
        run_id=told.run_id,
    )


def _store_address(distributed: Any) -> tuple[str, int]:
    """Return where the store of torch's process group listens; ``tcp://`` in the script tells no environment."""
    get_store = getattr(getattr(distributed, "distributed_c10d", None), "_get_default_store", None)
    try:
        store: Any = get_store() if get_store is not None else None
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return str(store.host), int(store.port)
    except (AttributeError, RuntimeError, ValueError):
        return "", 0  # a store of another kind, as of file://
