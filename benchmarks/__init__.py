"""What effllm costs, as ratios measured in one run against a bare lower bound or a peer."""
