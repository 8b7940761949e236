"""A second generator of jobs with a known loss, beside `benchmarks.planted`, made without the verdict's rules.

    python -m benchmarks.judged --virtual 490 --healthy 300 --real 62 --seeds 1000-1009

`job` has the physics and the truth of a job, `kinds` what is planted, `reports` passes a job through the aggregator in
virtual time, `real` and `rank` run short jobs with real processes, and `judging` compares verdicts with the truth.
"""
