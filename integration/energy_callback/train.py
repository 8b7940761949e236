"""Fine-tune a tiny Llama on generated tokens with the Trainer, and measure the energy of its steps."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

from effllm.instruments import EnergyTrackingCallback, RobustGPUMonitor


def main():
    monitor = RobustGPUMonitor(sampling_interval=0.5)
    monitor.start_monitoring()  # before the model is built, because the baseline needs earlier samples
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 256, (320, 64))]
    arguments = TrainingArguments(
        output_dir="out/energy_callback",
        per_device_train_batch_size=8,
        max_steps=40,
        logging_steps=5,
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
    energy = EnergyTrackingCallback(monitor, sync_interval_s=2.0, output_dir="out/energy_callback/results")
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=rows,
        data_collator=default_data_collator,
        callbacks=[energy],
    )
    trainer.train()
    monitor.stop_monitoring()


if __name__ == "__main__":
    main()
