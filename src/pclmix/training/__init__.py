"""Training: plan, data feed, step, schedules, checkpoints, run folder."""
