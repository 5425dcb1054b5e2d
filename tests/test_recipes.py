"""Recipes differ between methods only by listed deviations."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from pclmix.cli.options import RECIPES
from pclmix.config import Config, load_config, recipe_names, recipe_path
from pclmix.errors import PclmixError
from pclmix.methods.base import METHODS, build_params, find_method, load_all
from pclmix.nets.segmenter import NETS

load_all()
#: Settings that may not differ between methods: data, augmentation, training length.
SHARED = re.compile(r"(data\.|augment\.|seed|engine\.(?!batch))")
CASES = [(recipe, method) for recipe in recipe_names() for method in METHODS.names()]


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def written(recipe: str) -> dict[str, list[str]]:
    """The deviations as they stand in the file, nested lists opened: method -> key=value."""

    def opened(item: Any) -> list[str]:
        return [item] if isinstance(item, str) else [text for part in item for text in opened(part)]

    content = yaml.safe_load(recipe_path(recipe).read_text(encoding="utf-8"))
    return {name: opened(items) for name, items in (content.get("deviations") or {}).items()}


def test_help_names_every_recipe() -> None:
    assert set(re.findall(r"\w+", RECIPES.partition(" or ")[0])) == set(recipe_names())


def settings(config: Config) -> dict[str, Any]:
    return {key: value for key, value in flatten(config.model_dump()).items() if key != "method"}


@pytest.mark.parametrize(("recipe", "method"), CASES)
def test_a_method_differs_only_where_it_says_so(recipe: str, method: str) -> None:
    config = load_config(recipe, method)
    find, own = find_method(method), written(recipe).get(method, [])
    build_params(find, config.params)
    assert config.net in NETS
    # A recipe without this method's deviations is what the others start from.
    content = yaml.safe_load(recipe_path(recipe).read_text(encoding="utf-8"))
    content.pop("deviations", None)
    plain = Config.model_validate({**content, "recipe": recipe, "method": method})
    before, after = settings(plain), settings(config)
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    named = {line.partition("=")[0] for line in own}
    assert changed <= named
    assert not [key for key in named if SHARED.match(key)]


@pytest.mark.parametrize("recipe", recipe_names())
def test_deviations_name_methods_that_exist(recipe: str) -> None:
    assert set(written(recipe)) <= set(METHODS.names())


def test_every_published_deviation_says_why() -> None:
    text = recipe_path("paper").read_text(encoding="utf-8")
    lines = re.findall(r"^\s+- .*$", text[text.index("deviations:") :], flags=re.MULTILINE)
    assert len(lines) > 10
    assert all("# " in line for line in lines)


def test_the_published_settings() -> None:
    assert load_config("paper").net == "resnet50"
    for method, lr, batch in (("pce", 0.03, 12), ("em", 0.01, 12), ("trimix", 0.03, 12), ("scnet", 0.01, 6)):
        config = load_config("paper", method)
        assert (config.net, config.optim.lr, config.engine.batch) == ("unet", lr, batch)
        assert (config.optim.weight_decay, config.encoder.weights) == (1e-4, "none")
    cyclemix = load_config("paper", "cyclemix")
    assert (cyclemix.optim.name, cyclemix.optim.lr, cyclemix.engine.batch) == ("adamw", 1e-4, 4)


def test_every_method_can_be_put_on_the_encoder_of_pclmix() -> None:
    for method in METHODS.names():
        config = load_config("paper", method, ["net=resnet50", "encoder.weights=imagenet"])
        assert (config.net, config.encoder.weights) == ("resnet50", "imagenet")


def test_a_deviation_that_is_no_setting_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("deviations:\n  em:\n    - [optim.lr]\n", encoding="utf-8")
    with pytest.raises(PclmixError, match=r"mine\.yaml.*\bem\b.*'optim\.lr'"):
        load_config(str(path), "em")
