"""The tools that effllm is compared with, each in its own process in the peers' environment."""
