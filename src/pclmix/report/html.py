"""Pages from the templates of this folder: one file that opens offline, in light and dark, without a script."""

from __future__ import annotations

import base64
import io
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from pclmix.report.figures import style

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

#: Colours of pclmix.mplstyle and the CSS variables of style.css that take their place inside a page.
VARIABLES = {
    "#1c2430": "var(--ink)",
    "#5b6675": "var(--soft)",
    "#dfe3e8": "var(--rule)",
    "#0b6b8f": "var(--accent)",
    "#9fc4d4": "var(--faint)",
}


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("pclmix.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, **context: Any) -> str:
    """The page that `template` makes of `context`; every value is escaped."""
    return _environment().get_template(template).render(context)


def svg(figure: Any, label: str) -> Markup:
    """A matplotlib figure as an <svg> element in the colours of the page; `label` describes it to screen readers."""
    from markupsafe import Markup, escape
    from matplotlib import rc_context

    buffer = io.StringIO()
    with style(), rc_context({"savefig.bbox": None}):  # tight boxes would give each curve another width
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    referred = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in referred else "", text)
    text = re.sub(r' (?:xmlns(?::\w+)?|version)="[^"]*"', "", text)
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1))


def data_uri(picture: npt.NDArray[Any]) -> str:
    """RGB (H, W, 3) in 0 to 1 as a JPEG inside an address."""
    buffer = io.BytesIO()
    pixels = (255 * np.clip(picture, 0, 1)).round().astype(np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", quality=88, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
