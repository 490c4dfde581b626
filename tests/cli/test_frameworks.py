"""The rule that picks a command's framework, and that every command follows and names it."""

import sys
from importlib.metadata import PackageNotFoundError

import click
import pytest

from sonicmoe import frameworks
from sonicmoe.cli.main import main
from sonicmoe.cli.options import CHOICES, choice_line
from sonicmoe.errors import FrameworkError
from sonicmoe.frameworks import RULE, FrameworkChoice, FrameworkMissingError, choose, load
from sonicmoe.host import install_hint


def machine(monkeypatch, *installed, paddle_gpu=False):
    """These frameworks are installed, and no module of `sonicmoe` is bound to one yet."""

    def version(name):
        if not (name == "paddlepaddle-gpu" and paddle_gpu):
            raise PackageNotFoundError(name)
        return "3.3.1"

    monkeypatch.setattr(frameworks, "is_importable", lambda name: name in installed)
    monkeypatch.setattr(frameworks, "version", version)
    monkeypatch.delitem(sys.modules, "sonicmoe.interop", raising=False)


@pytest.mark.parametrize("requested", [None, "auto"])
@pytest.mark.parametrize(
    ("installed", "paddle_gpu", "name", "other"),
    [
        (("torch",), False, "torch", None),
        (("paddle",), False, "paddle", None),
        (("paddle",), True, "paddle", None),
        (("torch", "paddle"), False, "torch", "paddle"),
        (("torch", "paddle"), True, "paddle", "torch"),
    ],
)
def test_the_rule(monkeypatch, requested, installed, paddle_gpu, name, other):
    machine(monkeypatch, *installed, paddle_gpu=paddle_gpu)
    choice = choose(requested)
    assert (choice.name, choice.other) == (name, other)
    line = choice_line(choice)
    if other is None:
        assert line is None and choice.reason == "the only one installed"
    else:
        words = "both are installed; --framework"
        assert line == f"framework: {name} ({words} {other} takes the other)"


@pytest.mark.parametrize("name", ["torch", "paddle"])
def test_the_option_overrides_the_rule_and_is_not_remarked_on(monkeypatch, name):
    for paddle_gpu in (False, True):
        machine(monkeypatch, "torch", "paddle", paddle_gpu=paddle_gpu)
        assert choose(name) == FrameworkChoice(name, "asked for")
    assert choice_line(choose(name)) is None


def test_what_is_missing_is_said_with_how_to_install_it(monkeypatch):
    machine(monkeypatch, "torch")
    with pytest.raises(FrameworkMissingError) as missing:
        choose("paddle")
    assert missing.value.what == f"paddle is not installed in this Python ({sys.executable})"
    assert missing.value.remedy == install_hint("paddle")
    machine(monkeypatch)
    with pytest.raises(FrameworkError, match="neither PyTorch nor Paddle is installed; pip"):
        choose()


def test_a_process_stays_with_its_framework(monkeypatch):
    """`CliRunner`, or a notebook: another choice by the rule would be refused a moment later."""
    import sonicmoe.interop

    bound = sonicmoe.interop.FRAMEWORK
    monkeypatch.setattr(frameworks, "_is_installed", lambda name: bound == "torch")
    assert choose() == FrameworkChoice(bound, "this process runs on it already")
    load(bound)
    other = "paddle" if bound == "torch" else "torch"
    with pytest.raises(FrameworkError, match=f"already runs sonicmoe on {bound}; {other} needs a"):
        load(other)


def test_directory_is_no_framework(tmp_path, monkeypatch):
    """`tests/paddle` on the module path must not look like an installed Paddle."""
    (tmp_path / "no_such_framework").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not frameworks.is_importable("no_such_framework")
    assert frameworks.is_importable("json") and not frameworks.is_importable("no_such_module")


def test_every_command_that_computes_has_the_option():
    for command in ("doctor", "train", "bisect"):
        found = main.get_command(click.Context(main), command)
        option = next(option for option in found.params if option.name == "framework")
        assert tuple(option.type.choices) == CHOICES and RULE in option.help
