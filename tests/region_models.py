"""Small models for the tests of regions, patterns and inspection: networks by hand, and random graphs by hypothesis."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper

from qdqtune.graph.model import Model

SHAPE = [1, 8, 4, 4]

OPS = ["Relu", "Conv", "Add", "Add", "AddConst", "Mul", "Sub", "MatMul", "Split", "Concat", "If", "Shape", "Reshape"]


@dataclass
class Network:
    """Collects nodes; `add` returns the name of the first output. Every tensor is a float of one shape unless said."""

    inputs: list[str] = field(default_factory=lambda: ["input"])
    outputs: list[str] = field(default_factory=list)
    nodes: list[NodeProto] = field(default_factory=list)
    types: dict[str, int] = field(default_factory=dict)

    def add(self, op, *inputs, name=None, outputs=1, dtype=TensorProto.FLOAT, **attributes):
        name = name or f"node{len(self.nodes)}"
        made = [f"{name}:{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, made, name=name, **attributes))
        self.types.update(dict.fromkeys(made, dtype))
        return made[0]

    def conv(self, x, **attributes):
        return self.add("Conv", x, "weight", "bias", **attributes)

    def residual(self, x, prefix=None):
        names = [f"{prefix}/{k}" for k in ("a/Conv", "a/Relu", "b/Conv", "Add", "Relu")] if prefix else [None] * 5
        main = self.conv(self.add("Relu", self.conv(x, name=names[0]), name=names[1]), name=names[2])
        return self.add("Relu", self.add("Add", main, x, name=names[3]), name=names[4])

    def branch(self, *captures):
        """The body of an If that adds up what it captures."""
        nodes = [helper.make_node("Sum", captures, ["inner"], name="inner")]
        return helper.make_graph(nodes, "body", [], [helper.make_tensor_value_info("inner", TensorProto.FLOAT, SHAPE)])

    def model(self):
        constants = {"weight": (8, 8, 1, 1), "depthwise": (8, 1, 3, 3), "bias": (8,), "scalar": ()}
        initializers = [numpy_helper.from_array(np.zeros(s, np.float32), n) for n, s in constants.items()]
        initializers.append(numpy_helper.from_array(np.zeros(4, np.int64), "shape"))
        initializers.append(numpy_helper.from_array(np.zeros((), bool), "condition"))

        def info(tensor):
            return helper.make_tensor_value_info(tensor, self.types.get(tensor, TensorProto.FLOAT), SHAPE)

        known = [info(t) for t, dtype in self.types.items() if t not in self.outputs and dtype]
        graph = helper.make_graph(self.nodes, "network", [info(t) for t in self.inputs],
                                  [info(t) for t in self.outputs], initializers, value_info=known)  # fmt: skip
        return Model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))


def resnet(blocks):
    net = Network()
    x = net.add("Relu", net.conv("input"))
    for _ in range(blocks):
        x = net.residual(x)
    net.outputs = [x]
    return net.model()


@st.composite
def networks(draw, max_nodes=30):
    """Random graphs: several inputs, several outputs a node, captures, dead ends, parts that do not touch. No two nodes
    look alike."""
    net = Network(inputs=["in0", "in1", "in2"][: draw(st.integers(1, 3))])
    tensors, integers = list(net.inputs), []
    for k in range(draw(st.integers(1, max_nodes))):
        op = draw(st.sampled_from(OPS))
        recent = tensors[-draw(st.sampled_from([1, 3, 100])) :]
        picks = [draw(st.sampled_from(recent)) for _ in range(draw(st.integers(2, 3)))]
        if op == "If":
            body = net.branch(*picks)
            net.add("If", "condition", then_branch=body, else_branch=body, tag=k)
        elif op == "Split":
            net.add("Split", picks[0], outputs=2, tag=k)
            tensors.append(net.nodes[-1].output[1])
        elif op == "Shape":
            integers.append(net.add("Shape", picks[0], dtype=TensorProto.INT64, tag=k))
            continue
        else:
            inputs = {
                "Relu": picks[:1], "Conv": [picks[0], "weight", "bias"], "AddConst": [picks[0], "scalar"],
                "Reshape": [picks[0], draw(st.sampled_from(["shape", *integers]))], "Concat": picks,
            }.get(op, picks[:2])  # fmt: skip
            net.add(op.removesuffix("Const"), *inputs, tag=k)
        tensors.append(net.nodes[-1].output[0])
    made = [t for t in tensors if t not in net.inputs]
    net.outputs = draw(st.lists(st.sampled_from(made or tensors), unique=True, min_size=1, max_size=4))
    return net


def shuffled(net, order):
    """The same network with other names, and node `order[k]` at place k."""
    names = {n.name: f"n{len(order) - k}" for k, n in enumerate(net.nodes)}
    tensors = {t: f"t{97 * k % 1009}_{k}" for k, t in enumerate([*net.inputs, *net.types])}
    new = Network([tensors[t] for t in net.inputs], [tensors[t] for t in net.outputs])
    new.types = {tensors[t]: dtype for t, dtype in net.types.items()}
    for index in order:
        node = NodeProto()
        node.CopyFrom(net.nodes[index])
        node.name = names[node.name]
        node.input[:] = [tensors.get(t, t) for t in node.input]
        node.output[:] = [tensors[t] for t in node.output]
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                _rename_captures(attribute.g, tensors)
        new.nodes.append(node)
    return new, names, tensors


def _rename_captures(body: GraphProto, tensors):
    for node in body.node:
        node.input[:] = [tensors.get(t, t) for t in node.input]
