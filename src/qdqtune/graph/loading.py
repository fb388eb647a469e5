"""Reads an ONNX file as a `Model`: checks it, names nodes, collects constants, raises the opset, infers shapes.

External data stay on disk. Functions that need the whole graph (checker, version converter, shape inference) get it
with graph inputs in place of the large constants.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, inliner, numpy_helper, version_converter

from qdqtune.errors import BadModel, check_file, reading
from qdqtune.graph.constants import DENSE, SIZED, inner_tensors, replace, settle, take_external
from qdqtune.graph.inference import INFERENCE_ERRORS, infer, with_large_inputs, without_large_inputs
from qdqtune.graph.model import DEFAULT, LARGE_BYTES, Constant, Model, bodies, captured, graphs, size_of
from qdqtune.graph.simplifying import UniqueNames, drop_identities, drop_unused
from qdqtune.graph.simplifying import fix_inputs as fix
from qdqtune.system.checks import Content, stamp

TYPES = frozenset(TensorProto.DataType.values())

OLDEST_OPSET = 7
"""The oldest opset that onnx's version converter can convert from."""


def load(
    path: Path, *, fix_inputs: Mapping[str, float | int | str] = MappingProxyType({}), min_opset: int = 13
) -> Model:
    """Read an ONNX file; its opset becomes at least 13 and at least `min_opset`, its node names unique. `fix_inputs`
    makes graph inputs constant, and replaces each If that they decide by its body."""
    proto = read(path)
    try:
        return _ready(proto, path.absolute().parent, fix_inputs, min_opset)
    except BadModel as error:
        raise BadModel(f"{path}: {error}") from error
    except UnicodeDecodeError as error:
        raise BadModel(f"{path}: damaged: a name in it is not text") from error


def load_proto(proto: ModelProto) -> Model:
    """`load` for a model in memory, which is not changed. Its external data lie in the current folder."""
    return _ready(deepcopy(proto), Path.cwd(), {}, 13)


def _ready(proto: ModelProto, folder: Path, fix_inputs: Mapping[str, float | int | str], min_opset: int) -> Model:
    _check_types(proto.graph)
    if proto.ir_version < 4:  # constants had to be listed as inputs, and nobody could override them
        constants = {t.name for t in proto.graph.initializer}
        replace(proto.graph.input, [v for v in proto.graph.input if v.name not in constants])
        proto.ir_version = 4
    large = take_external(proto, folder)
    name_nodes(proto.graph)
    settle(proto.graph, large)
    proto = deepcopy(proto)  # what was taken out takes no memory in the copy
    _sort(proto.graph)
    _check(proto, large)
    if proto.functions:
        try:
            proto = inliner.inline_local_functions(with_large_inputs(proto, large), convert_version=True)
        except RuntimeError as error:
            raise BadModel(f"cannot inline the model's functions: {_message(error)}") from error
        settle(without_large_inputs(proto, large).graph, large)
    if fix_inputs:
        fix(proto, large, fix_inputs)
    name_nodes(proto.graph)
    drop_identities(proto.graph)
    drop_unused(proto.graph, large)
    _drop_false_types(proto, large)
    proto = _with_opset(proto, large, max(13, min_opset))
    return Model(infer(proto, large), large)


def _check_types(graph: onnx.GraphProto) -> None:
    """Refuse sparse constants and unknown types of elements; make sizes below 0 or named `?` dynamic, in place."""
    for inner in graphs(graph):
        if inner.sparse_initializer:
            raise BadModel(f"constant {inner.sparse_initializer[0].values.name!r} is sparse: {DENSE}")
        for value in (*inner.input, *inner.value_info, *inner.output):
            element = value.type.tensor_type.elem_type  # 0 for what is no tensor
            if element not in TYPES:
                raise BadModel(f"tensor {value.name!r} has an unknown element type ({element})")
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_value < 0 or dim.dim_param == "?":
                    dim.Clear()


def with_opset(model: Model, opset: int) -> Model:
    """`model` with its opset raised to `opset`, if it is lower."""
    if model.opset >= opset:
        return model
    large = dict(model.large)
    proto = _with_opset(deepcopy(model.proto), large, opset)
    return Model(infer(proto, large), large)


def checked(proto: ModelProto, large: Mapping[str, Constant]) -> Model:
    """Sort the nodes of `proto` in place, infer types and shapes, and check the model."""
    _sort(proto.graph)
    _check(proto, large)
    return Model(infer(proto, large), large)


def _drop_false_types(proto: ModelProto, large: Mapping[str, Constant]) -> None:
    """Remove listed types and shapes that contradict those inferred from the nodes, in place."""
    bare = with_large_inputs(proto, large)
    del bare.graph.value_info[:]
    for value in bare.graph.output:
        value.ClearField("type")
    try:
        inferred = onnx.shape_inference.infer_shapes(bare).graph
    except INFERENCE_ERRORS:
        return
    made = {value.name: value for value in (*inferred.value_info, *inferred.output) if kind_of(value)}
    listed = proto.graph.value_info
    replace(listed, [v for v in listed if v.name not in made or _fits(v, made[v.name])])
    for value in proto.graph.output:
        result = made.get(value.name)
        if result is not None and not _fits(value, result):
            value.type.CopyFrom(result.type)


def _fits(listed: onnx.ValueInfoProto, made: onnx.ValueInfoProto) -> bool:
    """Whether the type and shape that the file lists for a tensor are compatible with those that its node produces."""
    if kind_of(listed) not in ("", kind_of(made)):
        return False
    one, other = listed.type.tensor_type, made.type.tensor_type
    if not (one.HasField("shape") and other.HasField("shape")):
        return True
    sizes = zip(one.shape.dim, other.shape.dim, strict=False)
    known = [(a, b) for a, b in sizes if a.HasField("dim_value") and b.HasField("dim_value")]
    return len(one.shape.dim) == len(other.shape.dim) and all(a.dim_value == b.dim_value for a, b in known)


def read(path: Path) -> ModelProto:
    """The protobuf in a file, without its external data."""
    with reading(f"the model {path}", BadModel):
        check_file(path)
        if path.stat().st_size >= 2**31:
            raise BadModel(
                f"{path}: not an ONNX file: those have less than 2 GB. A larger model has its weights beside it "
                "(onnx.save, save_as_external_data=True)"
            )
        try:
            proto = onnx.load(path, format="protobuf", load_external_data=False)
        except DecodeError as error:
            raise BadModel(f"{path}: not an ONNX file, or damaged: export or copy it again") from error
    if not proto.HasField("graph"):
        raise BadModel(f"{path}: not an ONNX file, or cut short: it holds no graph; export or copy it again")
    return proto


def files_of(path: Path) -> list[Path]:
    """A model's file and the files of its external data."""
    with suppress(BadModel):  # loading it reports the error
        return [path, *(path.parent / place for place in data_files(path))]
    return [path]


def data_files(path: Path) -> tuple[str, ...]:
    """The files of a model's external data, as the model names them."""
    return _outside(Content(path, stamp(path)))[0]


def nbytes(model: Path) -> int:
    outside = _outside(Content(model, stamp(model)))[1]  # first: it says why a file cannot be read
    return model.stat().st_size + outside


def growth(model: Path, written: Path) -> str | None:
    """A note if a model's new version is a tenth larger or more, and its file stores numbers of less than 32 bits."""
    if nbytes(written) <= 1.1 * nbytes(model) or not _outside(Content(model, stamp(model)))[2]:
        return None
    return f"the new file is larger: {model.name} stores weights in fewer bits, and some of them are float32 now"


@lru_cache(maxsize=64)
def _outside(file: Content) -> tuple[tuple[str, ...], int, bool]:
    """The names of a model's external data files, the bytes that the model reads from them, and whether it holds large
    constants of numbers of less than 32 bits."""
    proto = read(file.path)
    tensors = [*proto.graph.initializer, *inner_tensors(proto)]
    named = {e.value for t in tensors for e in t.external_data if e.key == "location"}
    outside = (t for t in proto.graph.initializer if t.data_location == TensorProto.EXTERNAL)
    size = sum(size_of(t.data_type, t.dims) for t in outside)
    # Loading the model refuses names that no file can have.
    names = tuple(sorted(name for name in named if isinstance(name, str) and "\0" not in name))
    numbers = [t for t in tensors if t.data_type in SIZED - {TensorProto.BOOL}]
    narrow = (t for t in numbers if size_of(t.data_type, [8]) < 32)
    return names, size, any(size_of(t.data_type, t.dims) >= LARGE_BYTES for t in narrow)


def name_nodes(graph: onnx.GraphProto) -> None:
    """Name unnamed nodes by operator and position; a name that is already in use gets a number."""
    names, taken = UniqueNames(node.name for node in graph.node), set[str]()
    for i, node in enumerate(graph.node):
        if not node.name or node.name in taken:
            node.name = names.fresh(node.name or f"{node.op_type}_{i}")
        taken.add(node.name)


def _sort(graph: onnx.GraphProto) -> None:
    makers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    needs = []
    for node in graph.node:
        read = set(node.input).union(*map(captured, bodies(node)))
        needs.append(sorted({makers[name] for name in read & makers.keys()}))  # the order of a set may differ by run
    if any(j >= i for i, before in enumerate(needs) for j in before):
        try:
            order = list(TopologicalSorter(dict(enumerate(needs))).static_order())
        except CycleError as error:
            cycle = " -> ".join(graph.node[i].name for i in error.args[1][::-1])
            raise BadModel(f"invalid graph: its nodes form a cycle ({cycle})") from error
        replace(graph.node, [graph.node[i] for i in order])


def _check(proto: ModelProto, large: Mapping[str, Constant]) -> None:
    opset = max((o.version for o in proto.opset_import if o.domain in DEFAULT), default=0)
    newest = onnx.defs.onnx_opset_version()
    if proto.ir_version > onnx.IR_VERSION or opset > newest:
        raise BadModel(
            f"IR {proto.ir_version} or opset {opset} is later than the onnx package here knows ({onnx.IR_VERSION}, "
            f"{newest}): pip install -U onnx, or export it with a lower opset"
        )
    whole = with_large_inputs(proto, large)
    for info in (*whole.graph.input, *whole.graph.output):
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.shape.SetInParent()  # the checker requires a shape, engines do not
    try:
        onnx.checker.check_model(whole)
    except (onnx.checker.ValidationError, ValueError) as error:
        raise BadModel(f"invalid graph: {_message(error)}") from error


def _message(error: Exception) -> str:
    parts = (" ".join(part.split()).rstrip(".") for part in str(error).split("==> Context:"))
    return "; ".join(parts).rpartition("failed: ")[2][:300]


def _with_opset(proto: ModelProto, large: MutableMapping[str, Constant], target: int) -> ModelProto:
    have = next((o.version for o in proto.opset_import if o.domain in DEFAULT), None)
    if have is not None and have >= target:
        return proto
    if have is None:  # only operators of other domains
        proto.opset_import.add(version=target)
    else:
        again = f"export it again with opset {target} or later"
        if have < OLDEST_OPSET:
            raise BadModel(f"opset {have} is older than {OLDEST_OPSET}; {again}")
        if have < 13 and any(node.op_type == "Hardmax" for inner in graphs(proto.graph) for node in inner.node):
            raise BadModel(f"cannot convert from opset {have} to {target}: Hardmax changed its meaning; {again}")
        try:
            converted = version_converter.convert_version(with_large_inputs(infer(proto, large), large), target)
        except (version_converter.ConvertError, *INFERENCE_ERRORS) as error:
            raise BadModel(f"cannot convert from opset {have} to {target}: {_message(error)}; {again}") from error
        # The converter loses metadata and the order of inputs.
        proto, metadata = deepcopy(proto), {node.name: node.metadata_props for node in proto.graph.node}
        for opset in proto.opset_import:
            if opset.domain in DEFAULT:
                opset.version = target
        replace(proto.graph.node, without_large_inputs(converted, large).graph.node)
        replace(proto.graph.initializer, converted.graph.initializer)
        for node in proto.graph.node:
            if not node.metadata_props:
                node.metadata_props.extend(metadata.get(node.name, ()))
        settle(proto.graph, large)
        if have < 11:
            _keep_sampling(proto.graph)
        name_nodes(proto.graph)
        _check(proto, large)
    needed = onnx.helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True)
    proto.ir_version = max(proto.ir_version, needed)
    return proto


def _keep_sampling(graph: onnx.GraphProto) -> None:
    """Make Resize sample as before opset 11: the converter does not set attributes whose defaults have changed."""
    scales = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    for node in (node for inner in graphs(graph) for node in inner.node):
        if node.op_type == "Resize":
            known = scales.get(node.input[2], np.ones(1)) if len(node.input) > 2 else np.ones(1)
            nearest = "ceil" if (known < 1).any() else "floor"
            for name, value in (("coordinate_transformation_mode", "asymmetric"), ("nearest_mode", nearest)):
                if all(a.name != name for a in node.attribute):
                    node.attribute.append(onnx.helper.make_attribute(name, value))


def check_outputs(proto: onnx.ModelProto) -> None:
    """Refuse models with outputs that are sequences, maps or optional values, which cannot be compared."""
    for value in proto.graph.output:
        if value.type.WhichOneof("value") not in (None, "tensor_type"):
            kind = f"of type {kind_of(value)}"
            raise BadModel(f"output {value.name!r} is no tensor but {kind}: not supported (scikit-learn: zipmap=False)")


def kind_of(value: onnx.ValueInfoProto) -> str:
    """The element type of a tensor, or the kind of another value, for messages; empty if unknown."""
    kind = value.type.WhichOneof("value") or ""
    if kind != "tensor_type":
        return kind.removesuffix("_type").replace("_", " ")
    element = value.type.tensor_type.elem_type
    return TensorProto.DataType.Name(element).lower() if element else ""
