"""Instruments that a training script calls itself: memory, timers, throughput, metrics of training.

They run in the training process: standard library, and the torch that the script has imported; no thread and no wait.
"""
