"""Every engine symbol that we touch, with the signature that we rely on.

A seam is compared with the engine that is installed, twice: by ``register()`` with the imported
module, and by ``kvcache-plugin doctor`` with the source file, which imports nothing.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcache_plugin.hosts.engines import package_folders

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType


@dataclass(frozen=True)
class Seam:
    """A function of an engine.

    :param engine: the engine's top-level package.
    :param module: the module that defines the function.
    :param qualname: its name there, ``Class.method`` for a method.
    :param parameters: the parameters that we rely on, in order; ``"*"`` stands before those that
        are given by keyword. Further ones must have defaults.
    :param purpose: what we do there, in a few words.
    """

    engine: str
    module: str
    qualname: str
    parameters: tuple[str, ...]
    purpose: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.qualname}"


VLLM_LAYER: Final = Seam(
    "vllm",
    "vllm.model_executor.layers.quantization.kv_cache",
    "BaseKVCacheMethod.process_weights_after_loading",
    ("self", "layer"),
    "checks and writes the scales of one layer; without it none is checked",
)
VLLM_MODEL: Final = Seam(
    "vllm",
    "vllm.model_executor.model_loader.utils",
    "process_weights_after_loading",
    ("model", "model_config", "target_device"),
    "checks all layers before the first is processed",
)
VLLM_MARKER: Final = Seam(
    "vllm",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "CompressedTensorsKVCacheMethod.create_weights",
    ("self", "layer"),
    "marks scales that no checkpoint has set yet",
)
VLLM_CONFIG: Final = Seam(
    "vllm",
    "vllm.config.vllm",
    "get_current_vllm_config_or_none",
    (),
    "tells a dummy load's random weights from a checkpoint's; without it no scale is checked",
)
VLLM_LOAD: Final = Seam(
    "vllm",
    "vllm.model_executor.model_loader.default_loader",
    "DefaultModelLoader.load_weights",
    ("self", "model", "model_config"),
    "knows which model is loaded from which files",
)
VLLM_FILES: Final = Seam(
    "vllm",
    "vllm.model_executor.model_loader.default_loader",
    "DefaultModelLoader._prepare_weights",
    (
        "self",
        "model_name_or_path",
        "subfolder",
        "revision",
        "fall_back_to_pt",
        "allow_patterns_overrides",
    ),
    "checks the scales in the files before the weights are read",
)
VLLM_RANK: Final = Seam(
    "vllm",
    "vllm.distributed.parallel_state",
    "get_tensor_model_parallel_rank",
    (),
    "lets one process speak for all that hold parts of the same layers",
)
SGLANG_HOOKS: Final = Seam(
    "sglang",
    "sglang.srt.plugins.hook_registry",
    "HookRegistry.register",
    ("cls", "target", "hook", "hook_type"),
    "wraps the other seams; without it no scale is checked",
)
SGLANG_LAYER: Final = Seam(
    "sglang",
    "sglang.srt.layers.quantization.kv_cache",
    "BaseKVCacheMethod.process_weights_after_loading",
    ("self", "layer"),
    "checks and writes the scales of one layer; without it none is checked",
)
SGLANG_MODEL: Final = Seam(
    "sglang",
    "sglang.srt.model_loader.loader",
    "DefaultModelLoader.postprocess_weights",
    ("model", "target_device"),
    "checks all layers before the first is processed",
)
SGLANG_RESTORE: Final = Seam(
    "sglang",
    "sglang.srt.model_loader.loader",
    "DefaultModelLoader.restore_weights_before_loading",
    ("model", "target_device"),
    "puts raw scales back before a reload",
)
SGLANG_FILE: Final = Seam(
    "sglang",
    "sglang.srt.model_executor.model_runner_components.load_model_utils",
    "load_kv_cache_scales",
    ("*", "model", "kv_cache_dtype"),
    "checks and writes the scales of --quantization-param-path",
)
SGLANG_CONFIG: Final = Seam(
    "sglang",
    "sglang.srt.runtime_context",
    "get_model",
    (),
    "tells the KV cache dtype and a dummy load; without it no scale is checked",
)

SGLANG_LOADER: Final = Seam(
    "sglang",
    "sglang.srt.model_loader.loader",
    "get_model_loader",
    ("load_config", "model_config"),
    "says which loaders are left alone",
)
SGLANG_LOAD: Final = Seam(
    "sglang",
    "sglang.srt.model_loader.loader",
    "DefaultModelLoader._get_all_weights",
    ("self", "model_config", "model"),
    "knows which model is loaded from which files",
)
SGLANG_FILES: Final = Seam(
    "sglang",
    "sglang.srt.model_loader.loader",
    "DefaultModelLoader._prepare_weights",
    (
        "self",
        "model_name_or_path",
        "revision",
        "fall_back_to_pt",
        "allow_patterns_overrides",
    ),
    "checks the scales in the files before the weights are read",
)
SGLANG_RANK: Final = Seam(
    "sglang",
    "sglang.srt.runtime_context",
    "get_parallel",
    (),
    "lets one process speak for all that hold parts of the same layers",
)

SEAMS: Final = (
    VLLM_LAYER,
    VLLM_MODEL,
    VLLM_MARKER,
    VLLM_CONFIG,
    VLLM_LOAD,
    VLLM_FILES,
    VLLM_RANK,
    SGLANG_HOOKS,
    SGLANG_LAYER,
    SGLANG_MODEL,
    SGLANG_RESTORE,
    SGLANG_FILE,
    SGLANG_CONFIG,
    SGLANG_LOADER,
    SGLANG_LOAD,
    SGLANG_FILES,
    SGLANG_RANK,
)


def check_module(seam: Seam, module: ModuleType) -> str:
    """What does not fit in an imported module; empty when the seam fits."""
    found: object = module
    for name in seam.qualname.split("."):
        # From the class's own namespace: a bound method would hide its first parameter.
        found = vars(found).get(name) if isinstance(found, type) else getattr(found, name, None)
    found = getattr(found, "__func__", found)
    if not callable(found):
        return f"{seam.path} is missing"
    if inspect.iscoroutinefunction(found):
        return f"{seam.path} is no plain function"
    return _compare(seam, tuple(inspect.signature(found).parameters.values()))


def check_source(seam: Seam) -> str:
    """What does not fit in the installed source; empty when the seam fits. Nothing is imported."""
    path = source_file(seam)
    if path is None:
        return f"{seam.path} is missing: there is no module {seam.module}"
    try:
        nodes: Sequence[ast.stmt] = _parse(path).body
    except (SyntaxError, ValueError, OSError) as error:
        return f"{seam.path} cannot be judged: {path.name} cannot be read: {error}"
    node: ast.stmt | None = None
    for name in seam.qualname.split("."):
        named = [n for n in _statements(nodes) if getattr(n, "name", None) == name]
        if not named:
            return f"{seam.path} is missing"
        node = named[-1]
        nodes = node.body if isinstance(node, ast.ClassDef) else ()
    if not isinstance(node, ast.FunctionDef):
        return f"{seam.path} is no plain function"
    return _compare(seam, _parameters(node.args))


def _statements(nodes: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of one scope, also those under ``if``, ``try`` and ``with``."""
    for node in nodes:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _compare(seam: Seam, parameters: Sequence[inspect.Parameter]) -> str:
    names: list[str] = []
    needed: list[str] = []
    for parameter in parameters:
        if parameter.kind is _KEYWORD and "*" not in names:
            names.append("*")
        if parameter.kind in (*_POSITIONAL, _KEYWORD):
            names.append(parameter.name)
            if parameter.default is inspect.Parameter.empty:
                needed.append(parameter.name)
    count = len(seam.parameters)
    if tuple(names[:count]) == seam.parameters and set(needed) <= set(seam.parameters):
        return ""
    found, expected = ", ".join(names), ", ".join(seam.parameters)
    return f"{seam.path} has another signature: ({found}), not ({expected})"


_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
_KEYWORD: Final = inspect.Parameter.KEYWORD_ONLY


def _parameters(arguments: ast.arguments) -> list[inspect.Parameter]:
    """The parameters of a parsed function; a default is only known to be there."""
    default, empty = object(), inspect.Parameter.empty
    by_position = [*arguments.posonlyargs, *arguments.args]
    without = len(by_position) - len(arguments.defaults)
    parameters = [
        inspect.Parameter(arg.arg, _POSITIONAL[1], default=empty if i < without else default)
        for i, arg in enumerate(by_position)
    ]
    if arguments.vararg:
        parameters.append(inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    parameters += [
        inspect.Parameter(arg.arg, _KEYWORD, default=empty if given is None else default)
        for arg, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return parameters


def source_file(seam: Seam) -> Path | None:
    """The file of the seam's module, ``None`` where there is none. Nothing is imported."""
    # Only the top-level package is looked up: finding a submodule would import its parents.
    for root in package_folders(seam.engine):
        path = Path(root).joinpath(*seam.module.split(".")[1:])
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


@lru_cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path))
