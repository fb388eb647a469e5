"""Exports a PyTorch module to ONNX, by the exporter that is based on torch.export."""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from qdqtune.calibration.user_code import user_errors
from qdqtune.errors import BadModel, BadOption
from qdqtune.graph.loading import read

PROTOBUF_LIMIT = 2**31 - 2**24
"""Most bytes of weights in a single ONNX file: the limit of protobuf, with some margin."""

BATCH = "batch"

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters that take an argument by name: neither *args nor **kwargs."""


class Module(Protocol):
    forward: Callable[..., Any]


def is_module(model: object) -> TypeGuard[Module]:
    """Whether a value is a PyTorch module; does not import PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def export(module: Any, example_inputs: Any, path: Path) -> None:
    """Write a module to an ONNX file, in evaluation mode. The first dimension of every input is dynamic if the module
    allows it; else the sizes are those of the examples.

    `example_inputs` is what forward takes: a tensor, a sequence of arguments, or a mapping of keywords.
    """
    if example_inputs is None:
        raise BadOption("the model is a module of PyTorch: give `example_inputs`, what its forward takes")
    try:
        import onnxscript  # noqa: F401  (the exporter needs it)
        import torch
    except ImportError as error:
        install = "pip install 'qdqtune[torch]'"
        raise BadOption(f"PyTorch exports with onnxscript, which is not installed: {install}") from error
    bound = _bound(module, example_inputs)
    given = bound.arguments
    takes_names = all(p.kind in NAMED for p in bound.signature.parameters.values())
    sizes = [value.shape[0] for value in _tensors(given) if _is_batch(value)]
    repeats = 2 if 1 in sizes else 1  # the exporter takes a size of 1 for a constant
    size = sum(value.nbytes for value in (*module.parameters(), *module.buffers()))

    def write(examples: dict[str, Any], dynamic: Any) -> None:
        with user_errors(f"PyTorch cannot export {type(module).__name__}", BadModel):
            how = {"dynamo": True, "verbose": False, "external_data": size > PROTOBUF_LIMIT}
            bound.arguments = examples
            by_position, by_name = ((), examples) if takes_names else (bound.args, bound.kwargs)
            try:
                torch.onnx.export(module, by_position, path, kwargs=by_name, dynamic_shapes=dynamic, **how)
            except torch.onnx.OnnxExporterError as error:
                raise (error.__cause__ or error) from error  # the error itself only says how to look for it

    with _evaluating(module):
        if sizes:
            try:
                examples = _mapped(given, lambda v: v.repeat(repeats, *[1] * (v.ndim - 1)) if _is_batch(v) else v)
                write(examples, _mapped(given, lambda value: {0: BATCH} if _is_batch(value) else None))
                return
            except BadModel:  # the batch is a constant of the module
                path.unlink(missing_ok=True)
        write(given, None)


def example_shapes(file: Path, module: Any, example_inputs: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the example inputs, by the input names of the exported `file`."""
    names = [value.name for value in read(file).graph.input]
    tensors = list(_tensors(_bound(module, example_inputs).arguments))
    return {name: tuple(one.shape) for name, one in zip(names, tensors, strict=False)}


def _bound(module: Any, example_inputs: Any) -> inspect.BoundArguments:
    is_mapping, is_several = isinstance(example_inputs, Mapping), isinstance(example_inputs, list | tuple)
    positional = () if is_mapping else tuple(example_inputs) if is_several else (example_inputs,)
    try:
        return inspect.signature(module.forward).bind(*positional, **(example_inputs if is_mapping else {}))
    except TypeError as error:
        raise BadModel(f"`example_inputs` are not what forward of {type(module).__name__} takes: {error}") from error


def _is_batch(value: Any) -> bool:
    return bool(getattr(value, "ndim", 0))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: _mapped(one, change) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_mapped(one, change) for one in value])
    return change(value)


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)
    elif hasattr(value, "ndim"):
        yield value


@contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """Set a module to evaluation mode, and restore the mode of each of its parts at the end. Meanwhile, hide PyTorch's
    warnings about libraries that it lacks and about failed attempts to export."""
    modes = [(part, part.training) for part in module.modules()]
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    module.eval()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        for part, mode in modes:
            part.training = mode
