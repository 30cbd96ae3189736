"""Plans of training jobs before they start: memory by part, micro-batch size, time of a step.

One cost model: one device is a pool of one process, a sharded job is one pool, a cluster has several. `fake_model` runs
passes on fake tensors and counts live bytes, `memory` adds up the memory of a process, `speed` the time of a step.
"""
