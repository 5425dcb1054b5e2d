"""Studies of several trainings: cross-validation, ablation, sweep, demo."""
