"""The public face: starts and stops the agent, and hands the loop's calls to the recorder.

Runs in the training process, so it imports the standard library alone, and nothing here raises into the
loop: whatever fails costs metrics and one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from effllm.config import Config, ConfigError, Place, read_config, read_place
from effllm.network.discovery import DiscoveryError
from effllm.switches import is_off, this_process
from effllm.training import ownership
from effllm.training.facts import count as positive_count
from effllm.training.facts import plain, positive, text
from effllm.training.recorder import Recorder, whole_number
from effllm.training.ring import RingError
from effllm.training.session import AgentError, Session
from effllm.training.without_metrics import repeat_at_exit

NAN = float("nan")

#: The contract's six tags, with the names of the original's methods.
HEADLINE = {
    "amu": "amu_gb",
    "pcu": "pcu_ratio",
    "al": "al_seconds",
    "tt": "tt_tokens_per_param_per_sec",
    "st": "st_samples_per_param_per_sec",
    "aec": "aec_watts",
}
_IT = "it_tokens_per_sec"


@dataclasses.dataclass
class EfficientLLMMetrics:
    """The newest run-to-date values of the whole job; ``nan`` is what is not measured."""

    amu: float = NAN
    pcu: float = NAN
    al: float = NAN
    tt: float = NAN
    st: float = NAN
    it: float = NAN
    aec: float = NAN


class MetricsCollector:
    """What a training loop talks to.

    Args:
        collection_interval: seconds between device samples; the environment's where not given.
        history_size: slots of the ring; the environment's where not given.
    """

    def __init__(self, collection_interval: float | None = None, history_size: int | None = None) -> None:
        self._overrides = {"collection_interval_s": collection_interval, "history_size": history_size}
        self._facts: dict[str, Any] = {"parameters": {}, "run": {}, "first_iteration": 0, "warnings": []}
        self._config: Config | None = None
        self._place = Place()
        self._given_place: Place | None = None
        self._session: Session | None = None
        self._values: dict[str, float] = {}
        self._report = 0  # newest report seen
        self._iteration = 0  # of that report
        self._written = 0  # newest report given to a writer
        self._counts = False  # whether the loop calls record_iteration_end itself
        self._batch = (0, 0)  # tokens and samples that set_batch_config declared
        self._is_for_requests = False  # it was started by the first request, not by somebody who trains
        self._counted = [0, 0, 0, 0]  # what `count` was given since the last iteration that took it
        self._counted_loss: Any = None
        self._has_counted = False  # whether any of these is more than 0

    # --- life ---

    @property
    def is_collecting(self) -> bool:
        """Whether an agent runs for this rank."""
        return self._session is not None

    @property
    def recorder(self) -> Recorder | None:
        """What hooks stamp the steps of their framework with; ``None`` while nothing is collected."""
        return self._session.recorder if self._session is not None else None

    @property
    def has_parameters(self) -> bool:
        """Whether anybody has said how many parameters the model has."""
        return self._facts["parameters"].get("total") is not None

    @property
    def has_counted(self) -> bool:
        """Whether the loop has counted something of the running iteration by `count`."""
        return self._has_counted

    def start_collection(self) -> None:
        """Start the agent of this rank; a second start does nothing, and off means off."""
        if self._session is not None or is_off(this_process()):
            return
        try:
            self._place = self._given_place or read_place(this_process())
            config = self._read_config()
            self._report = self._iteration = self._written = 0  # a new run counts its own reports
            self._values = {}
            self._take_counted()
            self._session = Session(config, self._place, self._facts)
            self._session.start()
            repeat_at_exit("")
        except (ConfigError, RingError, DiscoveryError, OSError) as error:
            _say(f"no metrics, training goes on: {error}", self._place, everywhere=isinstance(error, AgentError))
            repeat_at_exit(str(error) if self._place.rank == 0 else "")
            self._abandon()

    def start_for_requests(self, facts: Mapping[str, Any], gpus: Sequence[int] = ()) -> None:
        """Start for a process that infers; whoever begins to train in it ends that, and has a run of their own."""
        self._learn(run=facts, gpus=list(gpus))
        self.serve_requests()
        self.start_collection()
        self._is_for_requests = self.is_collecting

    def serve_requests(self) -> None:
        """Say that iterations are requests, which come when they come: it is no stall where none does."""
        self._learn(serves_requests=True)

    def warn(self, line: str) -> None:
        """Have one line said to the person, once."""
        if self._session is not None:
            self._session.warn(line)

    def _abandon(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def stop_collection(self, status: str = "completed") -> None:
        """End the collection: rank 0 waits for the summary, five seconds at most; a second stop does nothing."""
        session = self._session
        if session is None:
            return
        began_s = time.time()
        session.finish(status)
        self._look()
        self._values = session.final_values(began_s) or self._values
        self._session = None
        session.close()
        self._counts = self._is_for_requests = self._facts["serves_requests"] = False
        ownership.release(ownership.EXPLICIT, "calls")
        ownership.release(ownership.EXPLICIT, "requests")
        ownership.release(ownership.GENERATION, "generation")

    def _read_config(self) -> Config:
        config = read_config(this_process())
        given = {name: value for name, value in self._overrides.items() if value is not None}
        interval, slots = given.get("collection_interval_s"), given.get("history_size")
        if interval is not None and not (isinstance(interval, int | float) and 0.01 <= interval <= 3600):
            raise ConfigError("collection_interval", interval, "must be a number of seconds from 0.01 to 3600")
        if slots is not None and not (isinstance(slots, int) and 16 <= slots <= 1_000_000):
            raise ConfigError("history_size", slots, "must be a whole number from 16 to 1000000")
        self._config = dataclasses.replace(config, **given)  # type: ignore[arg-type]
        return self._config

    # --- the loop's calls ---

    def record_iteration_start(self) -> None:
        """Stamp the start of an iteration: one optimizer step."""
        session = self._session
        if session is not None:
            if not self._counts:
                self._claim()
            session.recorder.start()

    def record_iteration_end(
        self,
        tokens_processed: int = 0,
        samples_processed: int = 0,
        *,
        tokens: int | None = None,
        tokens_loss: int = 0,
    ) -> None:
        """Stamp the end of an iteration.

        Args:
            tokens_processed: this rank's share of the positions, padding included.
            samples_processed: this rank's share of the samples.
            tokens: the same without padding, which makes TT; ``tokens_processed`` where not given.
            tokens_loss: positions with a label.
        """
        session = self._session
        if session is not None:
            if not self._counts:
                self._claim()
            if self._has_counted and not (tokens_processed or samples_processed or tokens or tokens_loss):
                self.end_counted()
            else:
                session.recorder.end(tokens_processed, samples_processed, tokens, tokens_loss)

    def sync_point(self) -> None:
        """Say that this rank has come to where it first waits for others: `effllm.sync_point`."""
        session = self._session
        if session is not None:
            session.recorder.sync_point()

    def set_peer_group(self, name: str, replica: str = "") -> None:
        """Say which ranks do the same work as this one: `effllm.set_peer_group`."""
        self._learn(peer_group=text(name)[:200], replica=text(replica)[:200])

    def count(
        self,
        tokens: int | None = None,
        samples: int | None = None,
        tokens_processed: int | None = None,
        tokens_loss: int = 0,
        loss: float | None = None,
    ) -> None:
        """Add to what the running iteration has counted on this rank: `effllm.count`."""
        session = self._session
        if session is None:
            return
        tokens, tokens_processed = (
            tokens_processed if tokens is None else tokens,
            tokens if tokens_processed is None else tokens_processed,
        )
        try:
            given = [whole_number(value or 0) for value in (tokens_processed, samples, tokens, tokens_loss)]
            if min(given) < 0:
                raise ValueError  # noqa: TRY301 - handled as the wrong types are
        except Exception:  # noqa: BLE001 - whatever the objects of the caller raise must not end the loop
            session.warn("effllm.count takes counts of at least 0 that are numbers, not tensors on a GPU; ignored")
            return
        self._counted = [before + now for before, now in zip(self._counted, given, strict=True)]
        self._has_counted = any(self._counted)
        if loss is not None:
            if getattr(loss, "is_cuda", False):
                session.warn("effllm.count was given a loss on the GPU, which is not read: pass loss.item()")
            else:
                self._counted_loss = loss

    def end_counted(self, samples: int = 0) -> None:
        """Stamp the end of an iteration with what `count` was given, for whoever sees the steps and no data.

        ``samples`` stand where `count` was given none.
        """
        session = self._session
        if session is not None:
            counts, loss = self._take_counted()
            counts[1] = counts[1] or samples
            session.recorder.end(*counts)
            if loss is not None:
                session.recorder.loss(self._facts["first_iteration"] + session.recorder.ordinal, loss)

    def _take_counted(self) -> tuple[list[int], Any]:
        counts, loss = self._counted, self._counted_loss
        self._counted, self._counted_loss, self._has_counted = [0, 0, 0, 0], None, False
        return counts, loss

    def _claim(self) -> None:
        """Have the hooks of frameworks be silent: the loop itself counts."""
        self._counts = ownership.claim(ownership.EXPLICIT, "calls")

    def record_step_start(self) -> None:
        """Stamp the start of a step: `record_iteration_start` by LLaMA-Factory's name."""
        if "style" not in self._facts["run"]:
            self._learn(run={"style": "Step"})
        self.record_iteration_start()

    def record_step_end(self, tokens_processed: int | None = None, samples_processed: int | None = None) -> None:
        """Stamp the end of a step; counts that are not given are those of `set_batch_config`."""
        tokens, samples = self._batch
        self.record_iteration_end(
            tokens if tokens_processed is None else tokens_processed,
            samples if samples_processed is None else samples_processed,
        )

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a stretch that is not iteration: ``evaluation``, ``checkpoint``, or anything else as ``other``."""
        session = self._session
        if session is None:
            yield
            return
        session.recorder.phase_start(name)
        try:
            yield
        finally:
            session.recorder.phase_end()

    def log_metrics(
        self,
        iteration: int | None = None,
        loss: float | None = None,
        writer: Any = None,
        *,
        step: int | None = None,
        tb_writer: Any = None,
    ) -> dict[str, float]:
        """Record the loss, and return the newest values of the whole job: at once, whatever they are by now.

        Args:
            iteration: the number of the iteration that ended last, as people know it.
            loss: its loss, as a number. A tensor on a GPU is not read, for that would be a synchronisation.
            writer: has ``add_scalar(tag, value, step)``; gets each report's values once.
            step: ``iteration`` by LLaMA-Factory's name.
            tb_writer: ``writer`` by LLaMA-Factory's name.

        Returns:
            The contract's six tags, ``nan`` where a value is not measured (yet).
        """
        iteration, writer = step if iteration is None else iteration, tb_writer if writer is None else writer
        if not self._facts.get("is_numbered") and self._session is not None:
            self._learn(is_numbered=True)  # once: whoever restarts the job knows by it what is done again
        return self.log_own(iteration, loss, writer)

    def log_own(self, iteration: int | None, loss: float | None = None, writer: Any = None) -> dict[str, float]:
        """Do as `log_metrics`, with a number that is our own count and need not go on over restarts."""
        session = self._session
        if session is not None:
            if getattr(loss, "is_cuda", False):
                session.warn("log_metrics was given a loss on the GPU, which is not read: pass loss.item()")
                loss = None
            session.recorder.loss(iteration, loss)
        self._look()
        if writer is not None and self._report > self._written:
            self._written = self._report
            self._write(writer)
        return {f"efficientllm/{tag}": self._values.get(tag, NAN) for tag in HEADLINE.values()}

    def _write(self, writer: Any) -> None:
        try:
            for tag in HEADLINE.values():
                if tag in self._values:
                    writer.add_scalar(f"efficientllm/{tag}", self._values[tag], self._iteration)
        except Exception as error:  # noqa: BLE001 - the writer is the caller's: what it raises must not end the loop
            if self._session is not None:
                self._session.warn(f"the writer given to log_metrics failed: {type(error).__name__}: {error}")

    def reset(self) -> None:
        """Let the run-to-date values start anew after the current window."""
        if self._session is not None:
            self._session.recorder.reset()

    # --- facts ---

    def set_model_parameters(self, model_parameters: int | None = None, *, num_parameters: int | None = None) -> None:
        """Set how many parameters the whole model has; ``num_parameters`` is LLaMA-Factory's name for it."""
        given = num_parameters if model_parameters is None else model_parameters
        self._learn(parameters={"total": positive_count(given), "is_share": False})

    def set_batch_config(self, sequence_length: int, batch_size: int) -> None:
        """Say how much one step processes on this rank, for loops that do not count."""
        self._batch = (int(sequence_length) * int(batch_size), int(batch_size))
        self._learn(run={"sequence_length": int(sequence_length), "batch_size": int(batch_size)})

    def record_facts(self, **facts: str | float | bool | None) -> None:
        """Add to what ``run.json`` says about the run; of rank 0, whose word it is."""
        self._learn(run=facts)

    def _learn(self, **facts: Any) -> None:
        for name, value in facts.items():
            if isinstance(value, Mapping):
                declared = {text(key): plain(one) for key, one in value.items()}
                self._facts[name] = {**self._facts.get(name, {}), **declared}
            elif value is not None:
                self._facts[name] = value
        if self._session is not None:
            self._session.tell(self._facts)

    # --- values ---

    def calculate_amu(self) -> float:
        """Return the average memory utilization in GB."""
        return self._value("amu")

    def calculate_pcu(self) -> float:
        """Return the peak compute utilization, 0..1."""
        return self._value("pcu")

    def calculate_al(self) -> float:
        """Return the average latency in seconds per iteration."""
        return self._value("al")

    def calculate_tt(self) -> float:
        """Return the token throughput in tokens per parameter and second."""
        return self._value("tt")

    def calculate_st(self) -> float:
        """Return the sample throughput in samples per parameter and second."""
        return self._value("st")

    def calculate_aec(self) -> float:
        """Return the average energy consumption in watts."""
        return self._value("aec")

    def calculate_it(self, tokens_generated: float, total_inference_time: float) -> float:
        """Return the inference throughput in tokens per second; ``nan`` where no time passed."""
        return tokens_generated / total_inference_time if total_inference_time > 0 else NAN

    def get_all_metrics(self) -> EfficientLLMMetrics:
        """Return the newest values."""
        self._look()
        found = {name: self._values.get(tag, NAN) for name, tag in HEADLINE.items()}
        return EfficientLLMMetrics(**found, it=self._values.get(_IT, NAN))

    def should_log(self, iteration: int | None) -> bool:
        """Whether a window ends at ``iteration``; never while metrics are off."""
        if self._session is None or self._config is None or iteration is None:
            return False
        return iteration % self._config.log_interval == 0

    def _value(self, name: str) -> float:
        self._look()
        return self._values.get(HEADLINE[name], NAN)

    def _look(self) -> None:
        if self._session is None:
            return
        document = self._session.board.read()
        self._report = document.get("report", self._report)
        self._iteration = document.get("iteration", self._iteration)
        self._values = document.get("values", self._values)


#: LLaMA-Factory's name.
EfficientLLMCollector = MetricsCollector


def _say(text: str, place: Place, everywhere: bool = False) -> None:
    if place.rank == 0 or everywhere:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(f"[EfficientLLM] {text}", file=sys.stderr, flush=True)  # noqa: T201 - before the first iteration


_collector: MetricsCollector | None = None


def get_metrics_collector() -> MetricsCollector:
    """Return the collector of this process; before `initialize_efficientllm_metrics` it collects nothing."""
    global _collector
    if _collector is None:
        _collector = MetricsCollector()
    return _collector


#: LLaMA-Factory's name.
get_efficientllm_collector = get_metrics_collector


def initialize_efficientllm_metrics(
    model_parameters: int | None = None,
    *positional: Any,
    collection_interval: float | None = None,
    sequence_length: int = 0,
    batch_size: int = 0,
    parameter_share: Mapping[str, int] | None = None,
    first_iteration: int = 0,
    total_iterations: int | None = None,
    flops_per_token: float | None = None,
    hardware_flops_per_token: float | None = None,
    facts: Mapping[str, Any] | None = None,
    place: Place | None = None,
    is_numbered: bool | None = None,
) -> MetricsCollector:
    """Start the metrics of this rank; call it on every rank, once, before the loop.

    A second call adds what it knows to the first.  After the model and without arguments by position both
    original signatures are served: ``(n, collection_interval)`` as in Megatron, and
    ``(n, sequence_length, batch_size, collection_interval)`` as in LLaMA-Factory.

    Args:
        model_parameters: parameters of the whole model.
        positional: see above.
        collection_interval: seconds between device samples; the environment's where not given.
        sequence_length: tokens of a sample, for `MetricsCollector.record_step_end` without counts.
        batch_size: samples of a step on this rank, likewise.
        parameter_share: instead of ``model_parameters``, what this rank alone contributes
            (``total``, ``trainable``, ``active``): the sum over all ranks is the model.
        first_iteration: iterations that an earlier run of the job has done.
        total_iterations: how many there will be, for the remaining time.
        flops_per_token: model FLOPs of a token, forward and backward, for MFU.
        hardware_flops_per_token: what the hardware does for it, recomputation included, for HFU.
        facts: what ``run.json`` should say about the run.
        place: where this rank stands, where the environment does not say it.
        is_numbered: whether ``first_iteration`` is known, and not guessed; above 0 it is, where nothing is said.
    """
    if len(positional) == 1:
        collection_interval = positional[0]
    elif positional:
        sequence_length, batch_size = positional[:2]
        collection_interval = positional[2] if len(positional) > 2 else collection_interval
    collector = get_metrics_collector()
    if collector._is_for_requests:
        collector.stop_collection()
        collector._facts["run"].pop("framework", None)
        collector._facts["gpus"] = []
    if collection_interval is not None:
        collector._overrides["collection_interval_s"] = collection_interval
    if parameter_share is not None:
        share = {kind: _count_or_zero(parameter_share.get(kind)) for kind in ("total", "trainable", "active")}
        collector._learn(parameters={**share, "is_share": True})
    elif model_parameters is not None:
        collector.set_model_parameters(model_parameters)
    collector._learn(
        first_iteration=positive_count(first_iteration) or (None if collector.is_collecting else 0),
        is_numbered=(True if positive_count(first_iteration) else None) if is_numbered is None else is_numbered,
        total_iterations=positive_count(total_iterations) if total_iterations else None,
        flops_per_token=positive(flops_per_token),
        hardware_flops_per_token=positive(hardware_flops_per_token),
        run=dict(facts or {}),
    )
    if sequence_length and batch_size:
        collector.set_batch_config(sequence_length, batch_size)
    collector._given_place = place or collector._given_place
    fresh = not collector.is_collecting
    collector.start_collection()
    if fresh and collector.is_collecting and collector._place.rank == 0:
        _greet(collector)
    return collector


def _count_or_zero(value: Any) -> int | None:
    return 0 if value == 0 else positive_count(value)


def _greet(collector: MetricsCollector) -> None:
    config, given = collector._config, collector._facts["parameters"]
    known = given.get("total") if not given.get("is_share") else None
    model = f"model with {known:,} parameters" if known else "model"
    assert config is not None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"[EfficientLLM] Metrics collection initialized for {model}")  # noqa: T201 - the original's lines
        print(  # noqa: T201
            f"[EfficientLLM] Collection interval: {config.collection_interval_s}s, History size: {config.history_size}",
            flush=True,
        )


def should_log_metrics(iteration: int | None = None, *, step: int | None = None) -> bool:
    """Whether a window ends at ``iteration``: divisible by LOG_INTERVAL; never while metrics are off.

    ``step`` is LLaMA-Factory's name for it.
    """
    return get_metrics_collector().should_log(step if iteration is None else iteration)


def finalize_efficientllm_metrics() -> None:
    """End the metrics of this rank; rank 0 waits for the summary, five seconds at most."""
    get_metrics_collector().stop_collection()


def count(
    tokens: int | None = None,
    samples: int | None = None,
    tokens_processed: int | None = None,
    tokens_loss: int = 0,
    loss: float | None = None,
) -> None:
    """Say what the running iteration works on; from anywhere in a loop whose steps something else sees.

    A loop of plain torch that is attached by the environment has its iterations seen, and this one call gives
    the tokens; an iteration of four micro-batches calls it four times::

        for step, batch in enumerate(loader):
            mask = batch["attention_mask"]                    # on the CPU: 8 sequences of 512, some padded
            effllm.count(tokens=int(mask.sum()), tokens_processed=mask.numel(), samples=len(mask))
            loss = model(**to_gpu(batch)).loss / 4
            loss.backward()
            if step % 4 == 3:
                optimizer.step()                              # an iteration of 32 samples, 16384 positions
                optimizer.zero_grad()

    Counts are this rank's share.  Where metrics are off this does nothing, and where the owner of the iterations
    counts them itself, as a Trainer does, what is given here is left aside.

    Args:
        tokens: positions without padding, which make TT; ``tokens_processed`` where not given.
        samples: sequences.
        tokens_processed: all positions; ``tokens`` where not given.
        tokens_loss: positions with a label.
        loss: of the iteration, as a number; of several the last one stands.
    """
    get_metrics_collector().count(tokens, samples, tokens_processed, tokens_loss, loss)


def sync_point() -> None:
    """Say that this rank has come to where it first waits for others in this iteration: before gradients are summed.

    In synchronous training every rank's iterations take equally long, so they do not tell which of them is slow. What
    lies between the start of an iteration and this call is the rank's own::

        loss = model(batch)
        with ddp.no_sync(): loss.backward()
        effllm.sync_point()
        all_reduce_gradients(ddp)

    Where gradients are summed while ``backward`` runs, the last moment before it is the place. One clock is read and
    nothing is waited for; where metrics are off, or between iterations, this does nothing.
    """
    if _collector is not None:
        _collector.sync_point()


def set_peer_group(name: str, replica: str = "") -> None:
    """Say which ranks do the same work as this one, so that it is compared with them alone; hooks of Megatron do.

    Args:
        name: that all of them say, as ``stage 3``; ranks of another EFFICIENTLLM_ROLE are never compared.
        replica: that all ranks say which wait for each other before the sync point, as ``replica 0`` in tensor or
            pipeline parallelism: of those, the time before it does not tell which is slow.
    """
    get_metrics_collector().set_peer_group(name, replica)


def phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Mark a stretch that is not iteration: ``with effllm.phase("evaluation"): ...``."""
    return get_metrics_collector().phase(name)


class Monitor:
    """What ``with effllm.monitor(...) as m`` gives: one call per iteration."""

    def __init__(self, collector: MetricsCollector) -> None:
        self._collector = collector
        self._done = 0

    def iteration(self, tokens: int = 0, samples: int = 0, loss: float | None = None) -> dict[str, float]:
        """End an iteration and begin the next; return the newest values of the whole job."""
        self._collector.record_iteration_end(tokens, samples)
        self._done += 1
        values = self._collector.log_own(self._collector._facts["first_iteration"] + self._done, loss)
        self._collector.record_iteration_start()
        return values

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Mark a stretch that is not iteration."""
        return self._collector.phase(name)


@contextlib.contextmanager
def monitor(parameters: int | None = None, **arguments: Any) -> Iterator[Monitor]:
    """Measure a loop: ``with effllm.monitor(parameters=n) as m: ... m.iteration(tokens=t, samples=s)``.

    Args:
        parameters: parameters of the whole model.
        arguments: those of `initialize_efficientllm_metrics`.
    """
    collector = initialize_efficientllm_metrics(parameters, **arguments)
    collector.record_iteration_start()
    try:
        yield Monitor(collector)
    except KeyboardInterrupt:
        collector.stop_collection("interrupted")
        raise
    except BaseException:
        collector.stop_collection("failed")
        raise
    collector.stop_collection("completed")
