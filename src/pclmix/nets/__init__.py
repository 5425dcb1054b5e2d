"""Networks: segmenter.py has the one that predicts, swin.py the transformer branch that PCLMix trains as well."""
