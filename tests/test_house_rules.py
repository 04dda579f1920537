"""How the code is written, held by tests: introductions, sizes, directions of imports, private names of torch, errors.

Not here: style, which ruff and mypy check. Each list of exceptions holds a written reason per entry; the aim is that they stay short.
"""

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainer_kit
from trainer_kit import exceptions

ROOT = Path(__file__).parent.parent
FOLDERS = ("trainer_kit", "callbacks", "examples", "benchmarks")
FILES = [
    path.relative_to(ROOT)
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.relative_to(ROOT).parts[:2] != ("trainer_kit", "callbacks")  # the link to callbacks/
]
PACKAGE = [path for path in FILES if path.parts[0] in ("trainer_kit", "callbacks")]

MAX_LINES, MAX_FUNCTION_LINES = 400, 60
LONG: dict[str, str] = {}  # "file" or "file::function" -> why it is longer

PRIVATE_TORCH = {  # file -> why
    "trainer_kit/torch_private.py": "it is the file for them",
    "trainer_kit/model/torch_init.py": "the private names that initialisation needs, each with its reason in the file",
    "trainer_kit/model/call.py": "`_orig_mod` is where torch.compile keeps the original module",
}
PUBLIC_IN_SPITE_OF_THE_NAME = {"_fields", "_make", "_replace", "_exit", "_current_frames"}  # of named tuples, os and sys


@functools.cache
def source(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(source(path))


def each(paths: list[Path]):
    return pytest.mark.parametrize("path", paths, ids=map(str, paths))


def test_there_is_something_to_look_at():
    assert len(PACKAGE) > 100 and {path.parts[0] for path in FILES} == set(FOLDERS)


def test_every_file_opens_with_what_it_is():
    """Style 3."""
    assert [path for path in FILES if len((ast.get_docstring(tree(path)) or "").split()) < 4] == []


def lengths(path: Path) -> Iterator[tuple[str, int]]:
    """The file and its functions, and by how many lines each is over its limit."""
    yield str(path), len(source(path).splitlines()) - MAX_LINES
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef):
            yield f"{path}::{node.name}", node.end_lineno - node.lineno + 1 - MAX_FUNCTION_LINES


def test_files_and_functions_are_small():
    """Style 4: a longer one has a written reason in LONG, and an entry that is no longer needed is taken out."""
    assert {name for path in FILES for name, over in lengths(path) if over > 0} == set(LONG)
    assert all(len(reason.split()) > 3 for reason in LONG.values())


def test_nothing_is_left_to_do():
    assert [path for path in FILES if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", source(path))] == []


def test_devices_are_not_called_by_name():
    """Design decision 16: `torch.accelerator` and the device's own module; never torch.cuda."""
    assert [path for path in PACKAGE if re.search(r"\btorch\.cuda\b|from torch import .*\bcuda\b", source(path))] == []


def test_numpy_is_not_used():
    assert [path for path in PACKAGE if "numpy" in {name for name, _ in imports(tree(path).body, everywhere=True)}] == []


@each(FILES)
def test_no_error_is_passed_over_in_silence(path):
    """Every handler names its exceptions; one that does nothing with the error says why in a comment."""
    lines = source(path).splitlines()
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        assert node.type is not None, f"{path}:{node.lineno} catches everything"
        idle = all(isinstance(part, (ast.Pass, ast.Continue, ast.Break, ast.Return)) and not is_call(part) for part in node.body)
        written = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        assert not idle or uses(node) or "#" in written or narrow(node), f"{path}:{node.lineno} says nothing"


def is_call(node: ast.stmt) -> bool:
    return isinstance(node, ast.Return) and any(isinstance(part, ast.Call) for part in ast.walk(node))


def uses(handler: ast.ExceptHandler) -> bool:
    return handler.name is not None and any(isinstance(part, ast.Name) and part.id == handler.name for part in ast.walk(handler))


def narrow(handler: ast.ExceptHandler) -> bool:
    """A question asked by trying, such as whether an object has a length: the error is the answer."""
    answers = all(isinstance(part, ast.Continue) or (isinstance(part, ast.Return) and part.value) for part in handler.body)
    return "Exception" not in ast.unparse(handler.type) and answers


def imports(nodes: list[ast.stmt], *, everywhere: bool = False) -> Iterator[tuple[str, int]]:
    """The modules that are imported when this one is, and their lines; with `everywhere`, inside functions and for types too."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "trainer_kit" else [node.module]
            yield from ((name, node.lineno) for name in names)
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        parts = ("orelse",) if for_types and not everywhere else ("body", "orelse", "finalbody", "handlers")
        if everywhere or not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for part in parts:
                yield from imports(getattr(node, part, []), everywhere=everywhere)


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


# Each does one small thing and is no part of the design.
BASE = {"exceptions", "names", "storage", "random_state", "torch_private", "records"}
INTERFACES = {"callback", "events", "task", "config"}  # what users write against
LOWER = {"mesh", "parameters", "ties", "events"}
MIDDLE = {"data", "optim", "gradients", "pipeline", "weights", "metrics"}
MAY_IMPORT = {
    **{name: {"exceptions", "names", "mesh", "ties", "torch_private"} for name in LOWER | BASE},
    "callback": {"events", "exceptions"},
    "task": {"exceptions"},
    "config": {"exceptions"},
    "metrics": BASE,
    "parallel": BASE | LOWER,
    "launch": BASE | {"ranks"},
    "testing": BASE | {"ranks"},
    "ranks": BASE,
    "weights": BASE | LOWER,
    "data": BASE | LOWER,
    "optim": BASE | LOWER,
    "gradients": BASE | LOWER,
    "pipeline": BASE | LOWER | {"task", "metrics", "data"},
    "model": BASE | LOWER | MIDDLE | {"task", "parallel"},
    "models": BASE | {"model", "parallel", "callback", "weights"},
    "peft": BASE | LOWER | {"model", "models", "parallel", "weights"},
    "checkpoint": BASE | LOWER | MIDDLE | INTERFACES,
    "causal_lm": BASE | {"task", "metrics"},
    "reduction": BASE | LOWER | MIDDLE,
    "loop": BASE | LOWER | MIDDLE | INTERFACES | {"reduction", "run_state"},
}
EDGE = {  # where everything is wired: may import anything
    "__init__", "agreement", "assembly", "boundary", "built_model", "default_callbacks", "description", "environment", "exporting",
    "fitting", "inference", "lifecycle",
    "quick_import", "run_length", "run_state", "saving", "trainer", "training_state",
}  # fmt: skip
CALLBACKS_MAY_IMPORT = {
    f"trainer_kit.{name}" for name in ("callback", "checkpoint.folder", "data", "exceptions", "storage")
}


def test_every_part_has_its_place():
    parts = {path.parts[1] if len(path.parts) > 2 else path.stem for path in FILES if path.parts[0] == "trainer_kit"}
    assert parts == set(MAY_IMPORT) | EDGE


@each([path for path in FILES if path.parts[0] == "trainer_kit"])
def test_imports_point_in_one_direction(path):
    """Design section 5: the lower parts know nothing of the rest; loop and trainer are the edge. Imports for types do not count."""
    part = path.parts[1] if len(path.parts) > 2 else path.stem
    found = {part_of(name) for name, _ in imports(tree(path).body) if name.startswith("trainer_kit.")}
    assert part in EDGE or found - {part} <= MAY_IMPORT[part]


@each([path for path in FILES if path.parts[0] == "callbacks"])
def test_callbacks_use_the_public_interface(path):
    """Design section 5: what a user's own callback could import."""
    found = {name for name, _ in imports(tree(path).body, everywhere=True) if name.startswith("trainer_kit")}
    found = {name for name in found if not name.startswith("trainer_kit.callbacks")}
    types = {"trainer_kit.events", "trainer_kit.parameters", "trainer_kit.trainer", "trainer_kit.task"}
    assert found <= CALLBACKS_MAY_IMPORT | types
    assert {name for name, _ in imports(tree(path).body) if not name.startswith("trainer_kit.callbacks")} & types == set()


def test_private_names_of_torch_are_in_one_file():
    """Design decision 18. `torch._foreach_*` counts as public: torch's own optimizers are written with it."""
    found = {str(path): [f"{line}: {name}" for name, line in private_names(tree(path))] for path in PACKAGE}
    assert {path: names for path, names in found.items() if names and path not in PRIVATE_TORCH} == {}
    assert all(found[path] and reason for path, reason in PRIVATE_TORCH.items())


def private_names(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Private modules of torch, private attributes of anything but the own object, and such names in getattr."""
    for name, line in imports(module.body, everywhere=True):
        if name.startswith("torch.") and any(part.startswith("_") for part in name.split(".")):
            yield name, line
    own = {node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            base, name = ast.unparse(node.value), node.attr
            mine = base in ("self", "cls", "super()") or name in own | PUBLIC_IN_SPITE_OF_THE_NAME
            if is_private(name) and not mine and not (base == "torch" and name.startswith("_foreach_")):
                yield f"{base}.{name}", node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            constant = node.args[1]
            if isinstance(constant, ast.Constant) and is_private(str(constant.value)) and constant.value not in PUBLIC_IN_SPITE_OF_THE_NAME:
                yield str(constant.value), node.lineno


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_errors(module: object) -> set[str]:
    found = vars(module).items()
    return {
        n for n, v in found if inspect.isclass(v) and issubclass(v, BaseException) and v.__module__ == module.__name__ and not is_private(n)
    }


def test_the_tree_of_exceptions_is_drawn_and_short():
    """Style 8: at most eight types, all of them in the docstring of their file."""
    types = own_errors(exceptions)
    drawn = set(re.findall(r"^[ ─├└]*(\w+)(?: \(|$)", exceptions.__doc__, re.MULTILINE)) & types
    assert drawn == types and len(types) <= 8
    for name in types - {"Interrupted"}:
        assert issubclass(getattr(exceptions, name), exceptions.TrainerKitError)
        (line,) = [text for text in exceptions.__doc__.splitlines() if re.match(rf"[ ─├└]*{name}\b", text)]
        bases = [base.__name__ for base in getattr(exceptions, name).__bases__ if base not in (Exception, exceptions.TrainerKitError)]
        assert all(f"({base})" in line for base in bases), line


def test_no_other_module_has_errors_of_its_own():
    """Style 8: what the package raises on purpose is in one file, so that callers can know all of it."""
    others = {}
    for info in pkgutil.walk_packages(trainer_kit.__path__, "trainer_kit."):
        if info.name != "trainer_kit.exceptions" and (types := own_errors(importlib.import_module(info.name))):
            others[info.name] = types
    assert others == {}


def test_what_is_exported_is_there_and_described():
    assert trainer_kit.__all__ == sorted(trainer_kit.__all__, key=lambda name: (name.lower(), name))
    for package in (
        "trainer_kit",
        "trainer_kit.callbacks",
        "trainer_kit.optim",
        "trainer_kit.metrics",
        "trainer_kit.data",
        "trainer_kit.parallel",
        "trainer_kit.peft",
        "trainer_kit.weights",
    ):
        module = importlib.import_module(package)
        for name in module.__all__:
            assert inspect.getdoc(getattr(module, name)), f"{package}.{name}"
    namespace: dict[str, object] = {}
    exec("from trainer_kit import *", namespace)
    assert set(trainer_kit.__all__) <= set(namespace)


def test_the_public_methods_of_the_trainer_are_described_and_typed():
    for name, method in vars(trainer_kit.Trainer).items():
        if not name.startswith("_") and inspect.isfunction(method):
            signature = inspect.signature(method)
            assert inspect.getdoc(method) and signature.return_annotation is not signature.empty, name
            assert all(p.annotation is not p.empty for p in list(signature.parameters.values())[1:]), name
