"""Finds the recipe that a user names: in a file, in a module, or among those of redrb."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from redrb.checks import did_you_mean, install_command
from redrb.errors import ConfigError
from redrb.recipe.recipe import Recipe

SHIPPED = "redrb.recipe.examples"
"""Package of the recipes that redrb has."""

OF_EXTRA = ("gymnasium", "transformers")
"""Modules of the extra `recipes`."""


def load(name: str) -> tuple[type[Recipe], Path | None]:
    """Return the recipe `FILE.py[:CLASS]`, `MODULE[:CLASS]`, or the name of one of redrb's recipes.

    The second is the file that was named; None for modules and for recipes of redrb.
    The folder of a file, or the working directory, is put on the path of imports.

    Raises:
        ConfigError: There is no such recipe, or it cannot be imported, or it is not complete.
    """
    place, _, wanted = name.partition(":")
    if place.endswith(".py") or "/" in place:
        path = Path(place)
        if not path.is_file():
            raise ConfigError(
                f"there is no recipe {place}: no such file.{_shipped_like(path.stem)}"
            )
        return _recipe_in(_file(path), place, wanted), path
    if place in shipped():
        return _recipe_in(_module(f"{SHIPPED}.{place}", place), place, wanted), None
    return _recipe_in(_module(place, place), place, wanted), None


def file_of(recipe: type[Recipe]) -> str:
    """Return the absolute path of the file that has a recipe; "" if it is not known."""
    try:
        return str(Path(inspect.getfile(recipe)).resolve())
    except (OSError, TypeError):
        return ""


def shipped() -> list[str]:
    """Return the names of redrb's recipes."""
    package = importlib.import_module(SHIPPED)
    return sorted(each.name for each in pkgutil.iter_modules(package.__path__))


def _file(path: Path) -> ModuleType:
    """Return the module of a file; other processes can import it by its name as well."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = path.stem
    if not name.isidentifier() or name in sys.modules or name in sys.stdlib_module_names:
        name = f"recipe_{''.join(c if c.isalnum() else '_' for c in path.stem)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported: a recipe is a file that ends with .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _explaining(str(path)):
        spec.loader.exec_module(module)
    return module


def _module(name: str, place: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigError(
            f"there is no recipe {place!r}: name a file such as my_recipe.py, a module, or one of "
            f"{', '.join(shipped())}.{_shipped_like(place)}"
        )
    with _explaining(place):
        return importlib.import_module(name)


@contextmanager
def _explaining(place: str) -> Iterator[None]:
    """Raise ConfigError for any error of a recipe's import, with the trace in its code."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # any error of the user's code ends here
        here = str(Path(__file__).parent)
        own = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith((here, "<frozen importlib"))
            and "/importlib/" not in frame.filename
        ]
        lines = [*traceback.format_list(own), *traceback.format_exception_only(error)]
        if isinstance(error, ModuleNotFoundError) and error.name in OF_EXTRA:
            lines.append(f"{error.name} is not installed: {install_command('recipes')}")
        raise ConfigError(
            f"the recipe {place} cannot be imported:\n{''.join(lines).rstrip()}"
        ) from error


def _recipe_in(module: ModuleType, place: str, wanted: str) -> type[Recipe]:
    """Return the recipe of a module: the only class of one, or the one that was asked for."""
    found = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Recipe)
        and (value.__module__ + ".").startswith(module.__name__ + ".")
    }
    if wanted:
        if wanted not in found:
            names = f"; it has {', '.join(found)}" if found else ""
            raise ConfigError(f"{place} has no recipe {wanted!r}{names}.")
        return _complete(found[wanted])
    bases = {base for value in found.values() for base in value.__mro__[1:]}
    last = {name: value for name, value in found.items() if value not in bases}
    if not last:
        raise ConfigError(
            f"{place} has no recipe: write a class that extends redrb.recipe.Recipe, PPORecipe or "
            "GRPORecipe (`redrb new grpo FILE` writes one)."
        )
    if len(last) > 1:
        choices = " or ".join(f"{place}:{name}" for name in last)
        raise ConfigError(f"{place} has several recipes: name one, {choices}.")
    return _complete(next(iter(last.values())))


def _complete(recipe: type[Recipe]) -> type[Recipe]:
    missing = recipe.missing()
    if missing:
        taken = {name: inspect.signature(getattr(recipe, name)).parameters for name in missing}
        parts = [f"{name}({', '.join(parameters)})" for name, parameters in taken.items()]
        raise ConfigError(f"the recipe {recipe.__name__} lacks {', '.join(parts)}.")
    return recipe


def _shipped_like(name: str) -> str:
    found = did_you_mean(name, shipped())
    return f" Recipes of redrb have no .py{found}" if found != "." else ""
