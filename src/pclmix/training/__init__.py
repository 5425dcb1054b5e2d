"""The only training loop: feed, step, schedules, checkpoints, the run folder."""
