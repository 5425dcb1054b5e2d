"""Datasets, checks, importers, preprocessing, the training store, stroke habits, batches."""
