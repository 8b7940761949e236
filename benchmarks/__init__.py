"""The cost of effllm, as ratios measured in one run against a bare lower bound or a peer."""
