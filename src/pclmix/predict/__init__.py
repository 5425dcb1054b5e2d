"""From a trained model to label maps: `load` a model, then `predict` arrays or `predict_files`."""

from pclmix.predict.base import About, Predictor
from pclmix.predict.model import load

__all__ = ["About", "Predictor", "load"]
