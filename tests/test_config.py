"""Configuration: recipes, overrides, and messages that name the key and the nearest one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pclmix.config import Augment, Config, Section, load_config, override_config, recipe_names, recipe_path
from pclmix.errors import PclmixError


def test_recipe_paper_has_the_published_settings() -> None:
    config = load_config("paper")
    assert config.data.size == (256, 256)
    assert config.data.intensity == "slice"
    assert (config.engine.batch, config.engine.iterations) == (12, 60000)
    optim = config.optim
    assert (optim.name, optim.momentum, optim.weight_decay) == ("sgd", 0.9, 0.0005)
    assert (optim.lr, optim.lr_end, optim.power) == (0.03, 0.001, 0.9)
    assert config.encoder.weights == "imagenet"
    assert config.net == "resnet50"
    assert config.augment == Augment()
    assert (config.augment.quarter_turns, config.augment.rotate, config.augment.degrees) == (0.5, 0.5, 20)


def test_recipe_names() -> None:
    assert {"paper", "fast", "hull", "tiny"} <= set(recipe_names())
    tiny = load_config("tiny")
    assert tiny.encoder.weights == "none"
    assert (tiny.engine.log_every, tiny.engine.save_every) == (1, 10)
    assert load_config("fast").encoder.weights == "imagenet"


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_suits_every_method(recipe: str) -> None:
    from pclmix.methods.base import METHODS, build_params, load_all

    load_all()
    for name, method in METHODS:
        config = load_config(recipe, name)
        assert config.method == name
        assert config.recipe == recipe
        build_params(method, config.params)


def test_a_recipe_deviates_for_a_method_only() -> None:
    assert load_config("tiny", "pclmix").params["queue"] == 50
    assert load_config("tiny", "pce").params == {}
    assert load_config("tiny", "pclmix", ["params.queue=7"]).params["queue"] == 7


def test_custom_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("net: resnet18\nmethod: pce\noptim: {lr: 1e-2}\ndeviations: {pce: [optim.clip=2]}\n")
    config = load_config(str(path))
    assert (config.recipe, config.net, config.method) == ("mine", "resnet18", "pce")
    assert (config.optim.lr, config.optim.clip) == (0.01, 2.0)
    assert load_config(str(path), "pclmix").optim.clip == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("net: [", "YAML"),
        ("just words", ""),
        ("[]", ""),
        ("deviations: 3", "'deviations'"),
        ("deviations: {pclmix: [lr]}", "'lr'"),
        ("optm: {lr: 1}", "'optim'"),
        ("optim: {lr: fast}", "optim.lr='fast'"),
        ("\xff", "mine.yaml"),
    ],
)
def test_unreadable_recipe(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PclmixError) as caught:
        load_config(str(path))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lrr=1", ["'optim.lrr'", "'lr'", "weight_decay"]),
        ("engin.batch=4", ["'engin'", "'engine'"]),
        ("lr=0.1", ["'lr'", "'optim.lr'"]),
        ("data.batch=4", ["'data.batch'", "'engine.batch'"]),
        ("engine.batch=0", ["engine.batch=0"]),
        ("engine.precision=16", ["engine.precision='16'", "'32'", "'bf16'"]),
        ("data.size=[1,2,3]", ["data.size"]),
        ("optim.lr.x=1", ["'lr'", "'optim.lr.x'"]),
        ("optim.lr=[", ["'optim.lr=['"]),
        ("=3", ["'=3'", "key=value"]),
        ("batch", ["'batch'", "key=value"]),
        ("augment.quarter_turns=1.5", ["augment.quarter_turns=1.5"]),
    ],
)
def test_invalid_override(override: str, words: list[str]) -> None:
    with pytest.raises(PclmixError) as caught:
        load_config("tiny", overrides=[override])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "engine.iterations=true",
        "engine.iterations=2.5",
        "engine.iterations=1" + 30 * "0",
        "engine.batch=1" + 30 * "0",
        "engine.seconds=.inf",
        "engine.seconds=1" + 30 * "0",
        "engine.seconds=true",
        "optim.lr=.inf",
        "optim.lr=.nan",
        "optim.lr=false",
        "data.size=[true, 64]",
        "data.size=[64, 1" + 30 * "0" + "]",
        "seed=true",
        "config={}",
    ],
)
def test_a_value_that_is_no_plain_number_is_refused_by_its_key(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(PclmixError, match=re.escape(key)):
        load_config("tiny", overrides=[override])


def test_method_parameters_are_as_strict() -> None:
    from pclmix.methods.base import build_params, find_method

    for value in (True, float("inf"), 10**30):
        with pytest.raises(PclmixError, match="lambda_ctr"):
            build_params(find_method("pclmix"), {"lambda_ctr": value})


def test_a_recipe_is_a_name() -> None:
    with pytest.raises(PclmixError, match=r"recipe=\[\]"):
        recipe_path([])  # type: ignore[arg-type]


def test_unknown_recipes_suggest_the_nearest() -> None:
    with pytest.raises(PclmixError, match=r"'papper'.*'paper'"):
        recipe_path("papper")
    with pytest.raises(PclmixError, match=r"nowhere\.yaml"):
        recipe_path("nowhere.yaml")


def test_values_are_parsed_as_yaml() -> None:
    given_keys = ["optim.lr=1e-4", "data.size=[32, 64]", "engine.precision=32", "engine.seconds=null", "seed=3"]
    config = load_config("tiny", overrides=given_keys)
    assert config.optim.lr == 1e-4
    assert config.data.size == (32, 64)
    assert config.engine.precision == "32"
    assert config.engine.seconds is None
    assert config.seed == 3


@given(st.floats(1e-6, 10), st.integers(1, 64), st.integers(0, 10**6))
def test_a_config_survives_yaml(lr: float, batch: int, seed: int) -> None:
    config = load_config("tiny", "pclmix", [f"optim.lr={lr}", f"engine.batch={batch}", f"seed={seed}"])
    again = Config.model_validate(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json"))))
    assert again == config
    assert override_config(config.model_dump(mode="json"), None, []) == config


def test_override_of_an_earlier_config() -> None:
    before = load_config("tiny").model_dump(mode="json")
    after = override_config(before, "pce", ["optim.lr=0.5"])
    assert (after.method, after.optim.lr, after.net) == ("pce", 0.5, "resnet10")
    assert before == load_config("tiny").model_dump(mode="json")


@pytest.mark.parametrize(("method", "overrides"), [("pce", []), (None, ["method=pce"]), ("em", ["method=pce"])])
def test_deviations_are_those_of_the_method(method: str | None, overrides: list[str]) -> None:
    found = load_config("paper", method, overrides)
    assert (found.method, found.net, found.optim.lr) == ("pce", "unet", 0.03)


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config("tiny").seed = 3  # type: ignore[misc]


def test_every_key_is_explained() -> None:
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            assert all(inner.description for inner in section.model_fields.values()), name
        else:
            assert field.description, name


def test_command_line_errors_do_not_name_the_recipe() -> None:
    with pytest.raises(PclmixError, match=r"optim\.lr='abc'") as caught:
        load_config("tiny", None, ["optim.lr=abc"])
    assert "tiny" not in str(caught.value)


@pytest.mark.parametrize("deviations", ["3", "{pclmix: 3}", "{pclmix: optim.lr=1}"])
def test_deviations_are_lists(tmp_path: Path, deviations: str) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"deviations: {deviations}", encoding="utf-8")
    with pytest.raises(PclmixError, match=r"mine\.yaml.*'deviations'"):
        load_config(str(recipe))


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.intensity=window"],
        ["data.window=[0, 1]"],
        ["data.intensity=window", "data.window=[2, 1]"],
        ["data.patch=[512, 64]"],
        ["data.patch=[64, 64]", "data.ring_share=0.1"],
    ],
)
def test_inconsistent_data_settings(overrides: list[str]) -> None:
    with pytest.raises(PclmixError, match="data"):
        load_config("tiny", None, overrides)
