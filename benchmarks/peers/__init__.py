"""The tools that effllm is measured beside, each in a process of its own in the peers' environment."""
