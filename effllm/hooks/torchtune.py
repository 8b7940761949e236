"""torchtune's fine-tuning recipes, full, LoRA, QAT and knowledge distillation: scripts that `tune run` starts.

A recipe is a script without a module name, so its base class `FTRecipeInterface` is hooked.  An iteration begins with
the transfer of its first batch to the device, and ends when the recipe steps its profiler after ``global_step`` has
increased.  The recipe has read its loss before the end, so a GPU has completed the iteration.  The time of torch's
DataLoader for later micro-batches is a data wait.

Tokens are all positions except the tokenizer's padding; the recipe's loss is weighted by the positions with a label.
Batches are counted on the CPU before their transfer, so nothing waits for a GPU.  Recipes with other batches (DPO, PPO)
are measured by the hook of torch's optimizers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import PurePath
from types import ModuleType
from typing import Any

from effllm.hooks import Unknown
from effllm.hooks._batches import Batches, LazyNumber
from effllm.hooks._layout import precision_of
from effllm.hooks._parameters import parameters_of
from effllm.hooks._steps import Steps, listen_to_waits, rank, version
from effllm.hooks._wrap import Call, Guard, around
from effllm.records.framework_figures import TOKENS_PER_S_PER_GPU
from effllm.trainer import ownership
from effllm.trainer.batch import UNKNOWN, Batch
from effllm.trainer.session import status_after

PHASES = {"validate": "evaluation", "save_checkpoint": "checkpoint"}

_GUARD = Guard("torchtune")
_LOG_GUARD = Guard("torchtune's logger")
_COUNT_GUARD = Guard("the parameter count of torchtune's model")


def attach(module: ModuleType) -> None:
    """Hook all recipes, in ``torchtune.recipe_interfaces``."""
    interface: Any = getattr(module, "FTRecipeInterface", None)
    if interface is None:
        raise Unknown("torchtune.recipe_interfaces has no FTRecipeInterface")

    def attach_subclass(cls: Any, /, **named: Any) -> None:
        super(interface, cls).__init_subclass__(**named)
        _GUARD(_attach_recipe, cls)

    interface.__init_subclass__ = classmethod(attach_subclass)


def attach_batches(module: ModuleType) -> None:
    """Hook the transfer of a batch to the device, in ``torchtune.utils``."""
    if not around(module, "batch_to_device", _GUARD, before=_LOOP.batch_begins):
        raise Unknown("torchtune.utils has no batch_to_device")


def _attach_recipe(recipe: Any) -> None:
    members = vars(recipe)
    if "train" in members:
        around(recipe, "train", _GUARD, before=_LOOP.train_begins, after=_LOOP.train_ended, failed=_LOOP.train_failed)
    for name, phase in PHASES.items():
        if name in members:
            _LOOP.wrap_as_phase(recipe, name, phase)


class _TorchtuneLoop:
    def __init__(self) -> None:
        self._steps = Steps(ownership.FRAMEWORK, "torchtune", "Step")
        self._batches = Batches(self._steps)
        self._recipe: Any = None  # while it trains
        self._coming_figure: LazyNumber | None = None  # tokens/s of the last log
        self._step = 0  # ``global_step`` at the end of the last iteration
        self._is_running = False  # whether an iteration has begun and not ended
        self._counts_data = True  # whether this rank counts its batches

    def train_begins(self, call: Call) -> None:
        """Store a recipe at the start of its training; the first batch starts the metrics."""
        recipe = self._recipe = call.args[0]
        self._is_running, self._coming_figure = False, None
        profiler = getattr(recipe, "_profiler", None)  # without a profiler, the next batch ends an iteration
        around(type(profiler), "step", _GUARD, after=self.profiler_stepped)
        around(type(getattr(recipe, "_metric_logger", None)), "log_dict", _LOG_GUARD, before=self.read_figure)
        client = getattr(recipe, "_checkpoint_client", None)
        if client is not None:
            self.wrap_as_phase(type(client), "save_checkpoint", "checkpoint")

    def batch_begins(self, call: Call) -> None:
        """Begin or continue an iteration, and count the batch while it is on the CPU."""
        batch, recipe = call.get("batch"), self._recipe
        if recipe is None or self._steps.num_open_phases or not isinstance(batch, Mapping):
            return
        ids, labels = batch.get("tokens"), batch.get("labels")
        has_tensors = hasattr(ids, "numel") and hasattr(labels, "numel")
        if not has_tensors or not (self._steps.is_owner or self._claim_and_begin()):
            return
        self._end_if_stepped()
        if not self._is_running:
            self._is_running = True
            self._steps.start_step()
        if self._counts_data:
            self._batches.add_batch(_counts_of(batch, recipe))

    def profiler_stepped(self, _token: Any, call: Call, _result: Any) -> None:
        if self._recipe is not None and call.args[0] is getattr(self._recipe, "_profiler", None):
            self._end_if_stepped()

    def read_figure(self, call: Call) -> None:
        """Read the figure that the recipe logs; from a GPU, it arrives with the next log.

        The figure is of the last step only, so it is ignored if only some steps log: these may be special.
        """
        recipe, values = self._recipe, call.args[1] if len(call.args) > 1 else call.get("payload")
        is_ours = recipe is not None and call.args[0] is getattr(recipe, "_metric_logger", None)
        if is_ours and getattr(recipe, "_log_every_n_steps", 1) == 1 and isinstance(values, Mapping):
            if self._coming_figure is not None:
                self._steps.record_figures({TOKENS_PER_S_PER_GPU: self._coming_figure.value_if_ready()})
            figure = values.get("tokens_per_second_per_gpu")
            self._coming_figure = LazyNumber(recipe.global_step, figure) if figure is not None else None

    def wrap_as_phase(self, holder: Any, name: str, phase: str) -> None:
        """Hook a function; its calls are a phase while a recipe trains."""
        self._steps.wrap_as_phase(holder, name, phase, _GUARD, self._phase_begins)

    def _phase_begins(self, _call: Call) -> bool:
        if self._recipe is not None:
            self._end_if_stepped()
        return self._recipe is not None

    def train_ended(self, *_: Any) -> None:
        self._finish("completed")

    def train_failed(self, _token: Any) -> None:
        self._finish(status_after(sys.exc_info()[1]))

    def _finish(self, status: str) -> None:
        self._recipe = None
        self._steps.finish(status)

    def _end_if_stepped(self) -> None:  # end the iteration if ``global_step`` has increased
        if self._is_running and self._recipe.global_step != self._step:
            self._step, self._is_running = self._recipe.global_step, False
            self._batches.end_iteration()

    def _claim_and_begin(self) -> bool:
        """Start the metrics; return whether these steps are counted."""
        if not self._steps.claim():
            return False
        recipe, self._step = self._recipe, self._recipe.global_step
        own_rank = rank()
        # Tensor parallel ranks read the same batch; data parallelism is the outer dimension.
        num_replicas = getattr(recipe, "dp_size", None) or getattr(recipe, "dp_degree", None)
        self._counts_data = not num_replicas or own_rank % max(recipe.world_size // num_replicas, 1) == 0
        counted = _COUNT_GUARD(parameters_of, recipe._model)
        epochs, steps = getattr(recipe, "total_epochs", None), getattr(recipe, "_steps_per_epoch", None)
        self._steps.begin_training(
            parameter_share=counted.share_of_rank(own_rank == 0) if counted else None,
            first_iteration=self._step,
            total_iterations=epochs * steps if epochs and steps else None,
            facts={
                "framework_version": version("torchtune"),
                "recipe": type(recipe).__name__,
                "precision": precision_of(getattr(recipe, "_dtype", "unknown")),
                "gradient_accumulation_steps": getattr(recipe, "_gradient_accumulation_steps", 1),
                **_model_of(recipe),
            },
        )
        self._batches.set_model(recipe._model, None)
        listen_to_waits(self._steps)
        return True


def _model_of(recipe: Any) -> dict[str, str]:
    """Return the name of the folder from which the recipe has loaded the model, if it is known."""
    owner = getattr(recipe, "_checkpoint_client", recipe)  # distributed recipes have a client around the checkpointer
    folder = getattr(getattr(owner, "_checkpointer", None), "_checkpoint_dir", None)
    return {"model": folder.name} if isinstance(folder, PurePath) and folder.name else {}


def _counts_of(batch: Mapping[str, Any], recipe: Any) -> Batch:
    ids: Any = batch["tokens"]
    labels: Any = batch["labels"]
    positions: Any = batch.get("input_pos")  # 0 at the start of each sequence
    padding = getattr(getattr(recipe, "_tokenizer", None), "pad_id", None)
    is_packed = positions is not None and positions.shape == ids.shape
    return Batch(
        tokens_processed=ids.numel(),
        samples=(positions == 0).sum() if is_packed else len(ids),
        tokens=ids.numel() if padding is None else (ids != padding).sum(),
        tokens_loss=(labels != getattr(getattr(recipe, "_loss_fn", None), "ignore_index", -100)).sum(),
        source=UNKNOWN if padding is None else "all positions except the tokenizer's padding",
    )


_LOOP = _TorchtuneLoop()
