"""Studies that train several times: cross-validation, ablation, sweep, demo."""
