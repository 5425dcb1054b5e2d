"""The paper's ablation of PCLMix (its second table) as variants of a study."""

from __future__ import annotations

from pclmix.studies.study import Variant


def _terms(*, ctr: bool, het: bool, mix: bool) -> tuple[str, ...]:
    """Overrides that turn terms off; a term that stays is not mentioned, so that recipes keep their weights."""
    weights = {"params.lambda_ctr": ctr, "params.lambda_het": het, "params.lambda_mix": mix}
    return tuple(f"{key}=0" for key, kept in weights.items() if not kept)


#: The paper's second table, in its order.
ABLATION = (
    Variant("sup", "1-sup", _terms(ctr=False, het=False, mix=False)),
    Variant("sup + ctr", "2-sup-ctr", _terms(ctr=True, het=False, mix=False)),
    Variant("sup + het", "3-sup-het", _terms(ctr=False, het=True, mix=False)),
    Variant("sup + het + mix", "4-sup-het-mix", _terms(ctr=False, het=True, mix=True)),
    Variant("sup + ctr + het", "5-sup-ctr-het", _terms(ctr=True, het=True, mix=False)),
    Variant("all, without pCE on Ft", "6-all-without-pce-on-ft", ("params.supervise_t=false",)),
    Variant("all", "7-all", ()),
)
