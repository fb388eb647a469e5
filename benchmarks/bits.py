"""How near alpha expansion comes to the cheapest bits of each part of a graph, against every assignment: twelve graphs
with parts in 8 bits, in 16 bits or in floats, at several prices on noise. Two labels (8 and 16 bits) are exact.

And how near the search by time comes to the fastest assignment that holds a limit on noise, where bytes cost an engine
what the search does not know, and each build errs by 1 %.

python benchmarks/bits.py
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import product

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from qdqtune.calibration.calibrate import unknown_ranges
from qdqtune.graph.loading import load_proto
from qdqtune.graph.model import Model
from qdqtune.placement import engine_rules
from qdqtune.placement.possible import possible_edges
from qdqtune.search import best_of
from qdqtune.search.by_rule import RuleSearch
from qdqtune.search.costs.labels import cheapest
from qdqtune.search.costs.rule_costs import FLOAT, W8A8, W8A16, W16A16, NoiseOfBits, Rates, RuleCosts
from qdqtune.timing.ratios import Plan
from qdqtune.tuning.shipping import accepted
from qdqtune.types import Accuracy, Layer, Measurement, Placement, Trial, sqnr_of

GRAPHS, PARTS = 12, 9
BUILDS, BUILD_ERROR, SHARES = 25, 0.01, (0.05, 0.2, 0.5)
PRICES = tuple(10.0**power for power in range(4, 10))


def network(seed: int) -> Model:
    """A network of convolutions, residual sums and concatenations, wired at random."""
    draw, width, size = random.Random(seed), random.Random(seed).choice([4, 8, 16]), random.Random(seed).choice([8, 32])
    weights, nodes, made = {}, [], ["x"]
    values = np.random.default_rng(seed)
    for number in range(PARTS):
        result = f"t{number}" if number < PARTS - 1 else "y"
        if number > 1 and draw.random() < 0.35:
            nodes.append(helper.make_node("Add", draw.sample(made[-3:], 2), [result], f"add{number}"))
        else:
            weights[f"w{number}"] = values.standard_normal((width, width, 3, 3)).astype(np.float32)
            read = [draw.choice(made[-2:]), f"w{number}"]
            nodes.append(helper.make_node("Conv", read, [result], f"conv{number}", pads=[1] * 4))
        made.append(result)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, width, size, size]) for n in "xy")
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "net", [x], [y], constants)
    return load_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def costs_of(model: Model) -> RuleCosts:
    """The costs by rule of a network, with pairs wherever they can stand."""
    possible = possible_edges(model, unknown_ranges(model))
    return RuleCosts(model, engine_rules.place_everywhere(model, possible, "int8"))


def noises(model: Model, seed: int) -> NoiseOfBits:
    """Noise of single tensors over three powers of ten, as networks have it; in 16 bits that of a finer step."""
    values = np.random.default_rng(seed)
    tensors = sorted({t for node in model.nodes for t in (*node.inputs, *node.outputs)})
    narrow = {tensor: float(10 ** values.uniform(-6, -3)) for tensor in tensors}
    return NoiseOfBits(narrow, {tensor: noise / 257**2 for tensor, noise in narrow.items()})


def compared(costs: RuleCosts, noise: NoiseOfBits, *, float_too: bool) -> tuple[int, float, float, float]:
    """At how many prices the result is not the cheapest, its worst ratio to that, and seconds of both."""
    missed, worst, took, brute = 0, 1.0, 0.0, 0.0
    for price in PRICES:
        problem = costs.problem(noise, price, float_too=float_too)
        begun = time.perf_counter()
        found = problem.cost(cheapest(problem))
        took, begun = took + time.perf_counter() - begun, time.perf_counter()
        allowed = [[n for n, cost in enumerate(own) if np.isfinite(cost)] for own in problem.costs]
        least = min(problem.cost(labels) for labels in product(*allowed))
        brute += time.perf_counter() - begun
        missed += found > least * (1 + 1e-6)
        worst = max(worst, found / least)
    return missed, worst, took / len(PRICES), brute / len(PRICES)


def fastest(costs: RuleCosts, noise: NoiseOfBits, rates: Rates, limit: float, seed: int) -> tuple[float, int]:
    """The time of what the search by time finds, over that of the fastest of all assignments that hold the limit on
    noise; and its builds."""
    real, draw = replace(costs, rates=rates), np.random.default_rng(seed)
    floats = real.total((FLOAT,) * len(costs.parts))

    def noise_of(placement: Placement) -> float:
        return costs.noise(costs.labels(placement), noise)

    def seconds(placement: Placement) -> float:
        return 1.0 + real.total(costs.labels(placement)) / floats

    search = RuleSearch(costs, noise, limit, noise_of, Plan())
    history: list[Trial] = []
    while len(history) < BUILDS and (batch := search.propose(history)):
        best = next((t for t in reversed(history) if t.accepted), None)
        against = best.placement if best else Placement()
        error = float(draw.normal(1.0, BUILD_ERROR))
        result = Measurement((seconds(against),) * 20, (seconds(batch[0].placement) * error,) * 20)
        layers = tuple(Layer(n.name, (n.name,), "", None, "compute") for n in costs.model.nodes)
        found = Accuracy(sqnr_of(noise_of(batch[0].placement)))
        holds = noise_of(batch[0].placement) <= limit
        trial = Trial(len(history) + 1, batch[0], against, result, accuracy=found, layers=layers, holds=holds)
        history += accepted([trial], Plan(), best)
    every = map(costs.placement, product((W8A8, W8A16, W16A16, FLOAT), repeat=len(costs.parts)))
    least = min(seconds(placement) for placement in every if noise_of(placement) <= limit)
    return seconds(best_of(history)) / least, len(history)


def main() -> None:
    """Print a row for each graph."""
    print("graph  parts  labels  not cheapest   worst/least  ms a cut  ms by brute force")
    for seed in range(GRAPHS):
        model = network(seed)
        costs = RuleCosts(
            model, engine_rules.place_everywhere(model, possible_edges(model, unknown_ranges(model)), "int8")
        )
        for float_too in (False, True):
            missed, worst, took, brute = compared(costs, noises(model, seed), float_too=float_too)
            row = f"{seed:5}  {len(costs.parts):5}  {2 + float_too:6}  {missed} of {len(PRICES):<8}  {worst:11.5f}"
            print(f"{row}  {1e3 * took:8.1f}  {1e3 * brute:10.0f}", flush=True)
    print("\ngraph  rates of 16 bits, floats, conversions; at shares of the noise of 8 bits: found/fastest, builds")
    for seed in range(GRAPHS):
        model, draw = network(seed), np.random.default_rng(seed)
        costs, noise = costs_of(model), noises(model, seed)
        rates = Rates(*(float(10 ** draw.uniform(-0.5, 0.7)) for _ in range(3)))
        narrow, wide = (costs.noise(costs.everywhere(label), noise) for label in (W8A8, W16A16))
        found = [fastest(costs, noise, rates, wide + share * (narrow - wide), seed) for share in SHARES]
        told = "  ".join(
            f"{share}: {ratio:.3f}, {builds:2}" for share, (ratio, builds) in zip(SHARES, found, strict=True)
        )
        print(f"{seed:5}  {rates.wide:5.2f} {rates.floats:5.2f} {rates.converted:5.2f}  {told}", flush=True)


if __name__ == "__main__":
    main()
