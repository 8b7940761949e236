"""The contents of HELLO and heartbeat messages."""

from __future__ import annotations

from collections.abc import Mapping

from effllm.agent.measuring import Measuring
from effllm.agent.proc import process_state
from effllm.agent.trainer import Trainer
from effllm.config.place import stated_gpus
from effllm.config.switches import this_process
from effllm.job.health.hang import WAITING
from effllm.records.facts import RankFacts, to_document
from effllm.records.identity import read_submission
from effllm.records.rank import MARKED_PHASES, ParameterCount
from effllm.records.ring import BETWEEN, PHASE_STATE, STARTUP, STATE_NAMES
from effllm.records.wire import Heartbeat, Hello


def hello(trainer: Trainer, measuring: Measuring) -> Hello:
    facts = trainer.facts
    of_run = facts if trainer.rank == 0 else RankFacts()
    environ = this_process()  # the agent has the environment of its trainer
    num_gpus, source = stated_gpus(environ) if measuring.devices.has_all_gpus else (0, "")
    return Hello(
        job=facts.job,
        agent=trainer.agent,
        rank=trainer.rank,
        local_rank=trainer.place.local_rank,
        world_size=trainer.place.world_size,
        host=facts.host,
        role=trainer.config.role,
        devices=tuple(series.device for series in measuring.devices.series),
        parameters=ParameterCount(**to_document(facts.parameters)),
        log_interval=trainer.config.log_interval,
        trainer_pid=trainer.pid,
        offset=facts.first_iteration,
        total_iterations=facts.total_iterations,
        flops_per_token=facts.flops_per_token,
        facts=dict(of_run.run),
        hardware_flops_per_token=facts.hardware_flops_per_token,
        is_numbered=facts.is_numbered,
        peer_group=facts.peer_group,
        replica=facts.replica,
        time_s=measuring.time_s(),
        start_time_s=measuring.cutter.start_time_s,
        style=of_run.style,
        evaluation_in_iterations=of_run.evaluation_in_iterations,
        iterations_not_measured=of_run.iterations_not_measured,
        submission=read_submission(environ, trainer.config.tags) if trainer.rank == 0 else None,
        stated_gpus=num_gpus,
        gpus_source=source,
        shares_gpu=_may_share(facts, environ),
    )


def _may_share(facts: RankFacts, environ: Mapping[str, str]) -> bool:
    """Whether other ranks may use the rank's GPU, because it sees only this one or MPS shares it."""
    listed = facts.visible_devices
    num_visible = facts.visible_gpus or (0 if listed is None else len(listed.split(",")))
    return num_visible == 1 or any(name.startswith("CUDA_MPS_") for name in environ)


def heartbeat(trainer: Trainer, measuring: Measuring, now_s: float) -> Heartbeat:
    """Return the state of a rank.

    Args:
        trainer: the rank's trainer.
        measuring: the rank's measurement.
        now_s: the current monotonic time.
    """
    state, ordinal, since_ns, phase = trainer.ring.state()
    name = MARKED_PHASES[phase] if state == PHASE_STATE else STATE_NAMES[state]
    if state in (STARTUP, BETWEEN) and trainer.facts.serves_requests:
        name = WAITING
    newest = measuring.devices.newest
    return Heartbeat(
        agent=trainer.agent,
        rank=trainer.rank,
        ordinal=ordinal,
        state=name,
        since_s=max(now_s - since_ns * 1e-9, 0.0),
        lost=measuring.outbox.lost,
        utilization=newest.utilization if newest else None,
        power_w=newest.power_w if newest else None,
        process=process_state(trainer.pid),
        time_s=measuring.time_s(),
    )
