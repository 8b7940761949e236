"""Megatron 0.8 and 0.9: train_step returns four values; there are two learning rates and no class of data iterators.

`eras.py` has the changes of later versions.
"""

import stand_in
from megatron.core.num_microbatches_calculator import get_num_microbatches  # noqa: F401 - a name of the loop's module
from stand_in import get_args


def num_floating_point_operations(args, batch_size):
    return stand_in.operations(args, batch_size)


def pretrain(dataset_provider, model_provider, model_type, forward_step_func, *_, **__):
    stand_in.initialize()
    model, optimizer, scheduler = setup_model_and_optimizer(model_provider, model_type)
    iteration, _ = train(forward_step_func, model, optimizer, scheduler, stand_in.data(), None, None, None, {})
    save_checkpoint(iteration, model, optimizer, scheduler, 0)
    evaluate_and_print_results("at the end", forward_step_func, None, model, iteration, None, None)


def setup_model_and_optimizer(model_provider_func, model_type, no_wd_decay_cond=None, scale_lr_cond=None, lr_mult=1.0):
    return stand_in.build_model()


def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config):
    losses, skipped = stand_in.step(data_iterator, model, optimizer, get_args().curr_iteration + 1)
    return losses, skipped, 1.0, None


def training_log(
    loss_dict,
    total_loss_dict,
    learning_rate,
    decoupled_learning_rate,
    iteration,
    loss_scale,
    report_memory_flag,
    skipped_iter,
    grad_norm,
    params_norm,
    num_zeros_in_grad,
):
    stand_in.log(loss_dict, iteration)
    return report_memory_flag


def save_checkpoint(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, *_, **__):
    stand_in.checkpoint()


def save_checkpoint_and_time(
    iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, checkpointing_context
):
    save_checkpoint(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far)


def train(
    forward_step_func,
    model,
    optimizer,
    opt_param_scheduler,
    train_data_iterator,
    valid_data_iterator,
    process_non_loss_data_func,
    config,
    checkpointing_context,
):
    args, iteration, flops = get_args(), get_args().iteration, 0
    while iteration < args.train_iters:
        stand_in.set_batch()
        args.curr_iteration = iteration
        losses, skipped, grad_norm, num_zeros = train_step(
            forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler, config
        )
        iteration += 1
        flops += num_floating_point_operations(args, stand_in.count_batch())
        training_log(losses, {}, 0.1, None, iteration, 1.0, True, skipped, grad_norm, None, num_zeros)
        if stand_in.is_due(args.eval_interval, iteration):
            evaluate_and_print_results(
                f"iteration {iteration}", forward_step_func, None, model, iteration, None, config
            )
        if stand_in.is_due(args.save_interval, iteration):
            save_checkpoint_and_time(iteration, model, optimizer, opt_param_scheduler, flops, checkpointing_context)
        stand_in.leave_if_asked(iteration)
    return iteration, flops


def evaluate(forward_step_func, data_iterator, model, process_non_loss_data_func, config, verbose=False, *_, **__):
    stand_in.evaluation()
    return {}, None, False


def evaluate_and_print_results(
    prefix, forward_step_func, data_iterator, model, iteration, process_non_loss_data_func, config, *_, **__
):
    evaluate(forward_step_func, data_iterator, model, process_non_loss_data_func, config)
