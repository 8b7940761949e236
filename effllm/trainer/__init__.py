"""The part of effllm in the training process: only the standard library; no call in the loop waits or raises."""
