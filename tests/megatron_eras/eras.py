"""The functions of ``megatron.training.training`` in five ranges of versions: a text, and what each range changed."""

from pathlib import Path

OLD, NEW = "0_8", "0_19"
COUNTS_REAL_TOKENS = """
def consume_seqlen_stats_in_iteration():
    real_tokens = get_args().real_tokens
    return (None, None) if real_tokens is None else (float(real_tokens), float(real_tokens**2))

def num_floating_point_operations(args, batch_size, seqlen_squared_sum_in_batch=None, total_real_tokens_in_batch=None):
""".strip()

#: The first range is `training_0_8.py`. A change of the range before is an old text and its new text, once in the code.
CHANGES = {
    OLD: [],
    # 0.10 to 0.13: checkpointing contexts, data iterators that can be rerun; train_step returns seven values.
    "0_12": [
        ("stand_in.data(), None, None, None, {}", "stand_in.rerun_data(), None, None, None, {}, None"),
        ("lr_mult=1.0):", "lr_mult=1.0, checkpointing_context=None):"),
        ("(model_provider, model_type)", "(model_provider, model_type, checkpointing_context={})"),
        ("return losses, skipped, 1.0, None", "return losses, skipped, False, False, 0, 1.0, None"),
        ("losses, skipped, grad_norm, num_zeros =", "losses, skipped, _, _, _, grad_norm, num_zeros ="),
        ("    checkpointing_context,\n):", "    checkpointing_context,\n    non_loss_data_func,\n):"),
    ],
    # 0.14 and 0.15: train_step has an argument with the schedule function.
    "0_14": [
        (
            "opt_param_scheduler, config):\n    losses",
            "opt_param_scheduler, config, forward_backward_func):\n    losses",
        ),
        ("opt_param_scheduler, config\n", "opt_param_scheduler, config, None\n"),
    ],
    # 0.16, 0.17: train_step returns eight values; the iteration is a keyword argument; the log has one learning rate.
    "0_16": [
        ("no_wd_decay_cond=None, scale_lr_cond=None, lr_mult=1.0, ", ""),
        ("forward_backward_func):", "forward_backward_func, iteration=None):"),
        ("False, False, 0, 1.0, None", "False, False, 0, 1.0, None, 0"),
        ("grad_norm, num_zeros =", "grad_norm, num_zeros, logit ="),
        ("config, None\n", "config, None, iteration=iteration\n"),
        ("    decoupled_learning_rate,\n", ""),
        (
            "    num_zeros_in_grad,\n",
            "    num_zeros_in_grad, max_attention_logit, pg_collection=None, is_first_iteration=False,\n",
        ),
        ("0.1, None, iteration", "0.1, iteration"),
        ("num_zeros)", "num_zeros, logit, is_first_iteration=iteration == 1)"),
        ("    non_loss_data_func,\n):", "    non_loss_data_func,\n    inference_model=None,\n):"),
    ],
    # 0.18 and later: a configuration container, swapped arguments of the setup function; the FLOPs of a step are
    # computed from the number of its real tokens, which are the tokens without padding.
    NEW: [
        ("def num_floating_point_operations(args, batch_size):", COUNTS_REAL_TOKENS),
        (
            "pretrain(dataset_provider, model_provider, model_type, forward_step_func, *_",
            "pretrain(cfg_container, dataset_provider, model_type, forward_step_func, model_provider=None, *_",
        ),
        (
            "(model_provider, model_type, checkpointing_context={})",
            "(model_type, model_provider, checkpointing_context={}, cfg_container=cfg_container)",
        ),
        (
            "(model_provider_func, model_type, checkpointing_context=None)",
            "(model_type, model_provider_func=None, checkpointing_context=None, *, cfg_container=None, **_)",
        ),
        ("iteration=None):", "iteration=None, pg_collection=None, p2p_communicator=None):"),
        (
            "is_first_iteration=False,\n",
            "is_first_iteration=False,\n    seqlen_squared_sum_in_batch=None, total_real_tokens_in_batch=None,\n",
        ),
        ("    inference_model=None,\n", "    inference_model=None, p2p_communicator=None, pg_collection=None,\n"),
        ("iteration=iteration\n", "iteration=iteration, pg_collection=None\n"),
        (
            "        training_log(",
            "        real_tokens, squares = consume_seqlen_stats_in_iteration()\n        training_log(",
        ),
        (
            "iteration == 1)",
            "iteration == 1, seqlen_squared_sum_in_batch=squares, total_real_tokens_in_batch=real_tokens)",
        ),
    ],
}


def text(era: str) -> str:
    """Return the code of the training loop in the versions of an era."""
    code = Path(__file__).with_name("training_0_8.py").read_text()
    for name, changes in CHANGES.items():
        for old, new in changes:
            assert code.count(old) == 1, f"{code.count(old)} times in {name}: {old}"
            code = code.replace(old, new)
        if name == era:
            return code
    raise KeyError(era)
