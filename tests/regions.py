"""Find an operation in an exported module, and run each region found with the reference in its place."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from autokernel import ops

TOLERANCE = {torch.float16: 4e-3, torch.float32: 2e-5}


class Recorder(fx.Interpreter):
    """Runs a graph and keeps the value of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, node: fx.Node) -> Any:
        self.values[node] = super().run_node(node)
        return self.values[node]


def find(operation: str, module: nn.Module, *inputs: Tensor) -> list[dict[str, Any]]:
    """The shapes of the regions of `operation`, after a check that each gives what the module computed there."""
    captured = torch.export.export(module.eval(), inputs, strict=False).module()
    recorder = Recorder(captured)
    recorder.run(*inputs)
    shapes = []
    for region in ops.get(operation).match(captured):
        assert region.operation == operation
        assert region.nodes[-1] is region.output
        assert not set(region.inputs) & set(region.nodes)
        assert all(set(node.users) <= set(region.nodes) for node in region.nodes if node is not region.output)
        arguments = region.bind(*(recorder.values[node] for node in region.inputs))
        given = {recorder.values[node].untyped_storage().data_ptr() for node in region.inputs}
        bound = {x.untyped_storage().data_ptr() for x in arguments.values() if isinstance(x, Tensor)}
        assert bound <= given, "bind made a copy"
        expected = recorder.values[region.output]
        result = region.finish(ops.get(operation).reference(**arguments))
        tolerance = TOLERANCE[expected.dtype]
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
        shapes.append(dict(ops.get(operation).describe(arguments)))
    return shapes
