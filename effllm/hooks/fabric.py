"""Lightning Fabric (``lightning.fabric`` or ``lightning_fabric``), and systems built on it such as litgpt.

Loops with a model and an optimizer that ``Fabric.setup`` has wrapped are measured.

An iteration begins with the first forward pass with gradients after a step, and ends with the wrapped optimizer's
``step``.  With gradient accumulation, an iteration has several micro-batches.  The data wait is the time of torch's
DataLoader, and the time between the step and the next forward pass.  If there are several optimizers, the iteration
ends with a step of the leader: the optimizer that made the last step before the iteration.  If a model was trained in
train mode, a forward pass in ``eval`` mode begins an evaluation; the evaluation lasts to the next forward pass that
trains.

The parameters of all models that train are counted; tokens and samples are read from the arguments of the first model.
A loop whose forward pass is not wrapped (a method of a LightningModule on one device, a wrapper that was compiled
again) is measured by the hook of torch's optimizers.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from effllm.hooks import Unknown
from effllm.hooks._batches import Batches, inputs_of
from effllm.hooks._layout import precision_of, strategy_facts
from effllm.hooks._parameters import Parameters, model_name, parameters_of
from effllm.hooks._steps import Steps, listen_to_waits, rank, version
from effllm.hooks._wrap import Call, Guard, around
from effllm.trainer import ownership
from effllm.trainer.collector import get_metrics_collector

_GUARD = Guard("Lightning Fabric")
_COUNT_GUARD = Guard("the parameter count of Lightning Fabric's model")
_PATIENCE_STEPS = 16  # the leader is replaced if other optimizers make more steps than this while it makes none


def attach(module: ModuleType) -> None:
    """Hook the wrappers of models and optimizers, in ``lightning.fabric.wrappers``."""
    model, optimizer = getattr(module, "_FabricModule", None), getattr(module, "_FabricOptimizer", None)
    if not (
        callable(getattr(model, "forward", None))
        and around(optimizer, "__init__", _GUARD, after=_LOOP.optimizer_made)
        and around(optimizer, "step", _GUARD, after=_LOOP.optimizer_stepped)
    ):
        raise Unknown(f"{module.__name__} has no _FabricModule.forward and _FabricOptimizer.step")
    _wrap_forward(model)


def attach_fabric(module: ModuleType) -> None:
    """Hook checkpoints, in ``lightning.fabric.fabric``."""
    fabric = getattr(module, "Fabric", None)
    if not _LOOP.wrap_checkpoint(fabric):
        raise Unknown(f"{module.__name__} has no Fabric.save: checkpoints are counted as data wait")


def _wrap_forward(model: Any) -> None:
    forward = model.forward
    is_compiling = getattr(sys.modules["torch"].compiler, "is_compiling", lambda: False)

    @functools.wraps(forward)
    def watched_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():  # during compilation, this call would break the compiler's graph
            _GUARD(_LOOP.forward_begins, self, args, kwargs)
        return forward(self, *args, **kwargs)

    model.forward = watched_forward


class _FabricLoop:
    def __init__(self) -> None:
        self._steps = Steps(ownership.CORE, "fabric", "Step")
        self._batches = Batches(self._steps)
        self._has_optimizer = False  # whether there is a wrapped optimizer
        self._is_running = self._is_evaluating = False  # whether an iteration or an evaluation has begun and not ended
        # Wrapped model -> its parameters; None if they could not be counted.
        self._parameters_by_model: weakref.WeakKeyDictionary[Any, Parameters | None] = weakref.WeakKeyDictionary()
        self._in_train_mode: weakref.WeakSet[Any] = weakref.WeakSet()  # models that have trained in train mode
        self._counted_model: Any = None  # model whose batches are counted; a weak reference, like the next 2 attributes
        self._leader: Any = None  # the optimizer whose step ends the iteration
        self._last_to_step: Any = None  # the optimizer that made the last step
        self._steps_of_others = 0  # steps of other optimizers since the leader's last step

    def optimizer_made(self, *_: Any) -> None:
        """Record that there is a wrapped optimizer; a loop without a wrapped optimizer is not measured here."""
        self._has_optimizer = True

    def forward_begins(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:  # of any model
        is_training_mode = model.module.training
        may_evaluate = not is_training_mode and model in self._in_train_mode
        if may_evaluate or not sys.modules["torch"].is_grad_enabled():
            if may_evaluate:
                self._begin_evaluation()
            return
        if not self._claim():
            return
        if model not in self._parameters_by_model or _referent(self._counted_model) is None:
            self._add_model(model)
            if _referent(self._counted_model) is None:
                return  # this model is frozen, and no other model has trained so far
        if is_training_mode:
            self._in_train_mode.add(model)
        self._end_evaluation()
        if not self._is_running:
            self._is_running, self._leader, self._steps_of_others = True, self._last_to_step, 0
            self._steps.start_step()
        if _referent(self._counted_model) is model:
            is_whole_batch = bool(args) and isinstance(args[0], Mapping)  # as in training_step(batch, index)
            self._batches.add_batch(args[0] if is_whole_batch else inputs_of(model.module, args, kwargs))

    def optimizer_stepped(self, _token: Any, call: Call, _result: Any) -> None:
        """End the iteration if this optimizer leads; a step that a gradient scaler skips counts too."""
        if not self._steps.is_owner:
            return
        optimizer, leader = call.args[0], _referent(self._leader)
        self._last_to_step = weakref.ref(optimizer)
        self._steps_of_others += 1
        if optimizer is leader or leader is None or self._steps_of_others > _PATIENCE_STEPS:
            self._leader, self._steps_of_others = self._last_to_step, 0
            if self._is_running:
                self._is_running = False
                self._batches.end_iteration()

    def wrap_checkpoint(self, fabric: Any) -> bool:
        return self._steps.wrap_as_phase(fabric, "save", "checkpoint", _GUARD, self._checkpoint_begins)

    def _checkpoint_begins(self, _call: Call) -> bool:
        self._end_evaluation()
        return True  # each call is a phase

    def _claim(self) -> bool:
        """Return whether these steps are counted; an owner nearer to the user has precedence."""
        if self._steps.is_owner:
            return True
        if not self._has_optimizer or not self._steps.claim():
            return False
        self._parameters_by_model.clear()
        self._counted_model, self._is_running, self._is_evaluating = None, False, False
        listen_to_waits(self._steps)
        return True

    def _add_model(self, model: Any) -> None:
        """Add the parameters of a new model; the first model that trains starts the metrics."""
        counted = self._parameters_by_model[model] = _COUNT_GUARD(parameters_of, model._forward_module)
        if counted is not None and not counted.trainable:
            return
        if _referent(self._counted_model) is not None:
            if share := self._share():
                self._steps.declare_parameters(share)
            return
        self._counted_model = weakref.ref(model)
        strategy = model._strategy
        self._steps.begin_training(
            parameter_share=self._share(),
            first_iteration=None if get_metrics_collector().is_collecting else 0,
            is_numbered=False,
            facts={
                "framework_version": version(type(model).__module__),
                "model": model_name(model.module),
                **strategy_facts(strategy),
                "precision": precision_of(getattr(strategy.precision, "precision", "unknown")),
            },
        )
        self._batches.set_model(model.module, counted)

    def _share(self) -> dict[str, int] | None:
        """Return this rank's share of the parameters; ``None`` if the number of any model is unknown."""
        trained = [counts for counts in self._parameters_by_model.values() if counts is None or counts.trainable]
        counted = [counts for counts in trained if counts is not None]
        if not counted or len(counted) < len(trained):
            return None
        shares = [parameters.share_of_rank(rank() == 0) for parameters in counted]
        if len(shares) == 1:
            return shares[0]
        return {key: sum(share[key] for share in shares) for key in ("total", "trainable")}  # active: of one model only

    def _begin_evaluation(self) -> None:
        if self._steps.is_owner and not self._is_evaluating:
            self._is_evaluating = True
            self._steps.phase_start("evaluation")

    def _end_evaluation(self) -> None:
        if self._is_evaluating:
            self._is_evaluating = False
            self._steps.phase_end()


def _referent(reference: Any) -> Any:  # of a weak reference, or None
    return reference() if reference is not None else None


_LOOP = _FabricLoop()
