"""The aggregator's process: its loop, who is admitted, what is acknowledged, and where reports go."""
