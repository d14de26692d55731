"""The exceptions of composerlite, and the help that they give."""

from __future__ import annotations

import inspect

import pytest

from composerlite import errors
from composerlite.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ComposerliteError,
    ConfigError,
    TrainingError,
    UnknownArgumentError,
    checked_arguments,
)


def test_one_base_catches_all() -> None:
    """``except ComposerliteError`` catches everything that composerlite raises on purpose."""
    raised = [e for e in vars(errors).values() if inspect.isclass(e) and issubclass(e, Exception)]
    assert len(raised) > 8
    assert all(issubclass(e, ComposerliteError) for e in raised)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ConfigError, ValueError),
        (UnknownArgumentError, TypeError),
        (TrainingError, RuntimeError),
        (CheckpointError, RuntimeError),
        (CheckpointNotFoundError, FileNotFoundError),
        (CheckpointExistsError, FileExistsError),
    ],
)
def test_errors_are_what_people_already_catch(error: type[Exception], builtin: type[Exception]) -> None:
    """Scripts that catch the built-in exception go on to work."""
    assert issubclass(error, builtin)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """Every exception is drawn in the module's docstring."""
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in errors.__all__ if name.endswith("Error"))


@checked_arguments
def save(folder: str, *, save_interval: str = "1ep", overwrite: bool = False) -> tuple[str, str, bool]:
    """A function that users call with keyword arguments."""
    return folder, save_interval, overwrite


class Saver:
    """A class that users build with keyword arguments."""

    @checked_arguments
    def __init__(self, *, folder: str = "runs") -> None:
        self.folder = folder


def test_a_misspelt_argument_names_the_right_one() -> None:
    """The error names what was wrong, what is near and what there is."""
    with pytest.raises(UnknownArgumentError) as error:
        save("runs", save_intervall="2ep")  # type: ignore[call-arg]
    assert str(error.value) == (
        "save has no argument 'save_intervall'. Did you mean 'save_interval'? Known: folder, overwrite, save_interval."
    )


def test_a_class_is_named_as_a_class() -> None:
    """The error of a constructor names the class, and ``self`` is no argument."""
    with pytest.raises(UnknownArgumentError, match=r"^Saver has no argument 'path'\. Known: folder\.$"):
        Saver(path="runs")  # type: ignore[call-arg]
