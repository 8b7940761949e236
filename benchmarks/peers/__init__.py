"""The tools compared with effllm; each runs in its own process in the environment .venv-peers."""
