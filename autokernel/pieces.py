"""A model that torch.export cannot capture, as the graphs that TorchDynamo finds between the places where Python decides.

Each call of a graph in one forward pass is a piece: it is exported by itself, with the weights that it was called with, and
searched for operations as a whole model would be. The model's own Python runs between the pieces, as it does without us.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autokernel.capture import Capture, NotCapturable, Refusal, capture, common_path, first_line, numbered
from autokernel.graph import Region

# One graph may serve all layers, or each layer may have its own: either way none may fall back to plain Python.
_GRAPHS = 4096

Graph = Callable[..., Any]


@dataclass(frozen=True)
class Piece:
    """The call of a graph: which one, and with what. `captured` is None if it could not be exported."""

    code: str  # of the graph
    inputs: tuple[Any, ...]  # for each, the parameter or buffer that it is, or else its form
    captured: Capture | None

    def is_called_by(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        """Whether this is a call of the same graph with the same weights, and other inputs of the same form."""
        if len(inputs) != len(self.inputs) or graph.code != self.code:
            return False
        pairs = zip(self.inputs, inputs, strict=True)
        return all(given is known if isinstance(known, Tensor) else _form(given) == known for known, given in pairs)

    def rest(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs that are no weights: the arguments of `captured.module`."""
        return [given for known, given in zip(self.inputs, inputs, strict=True) if not isinstance(known, Tensor)]


class Pieces:
    """The pieces of a model in the order of their calls. `regions`, `refused` and `names` are those of all pieces."""

    def __init__(self, model: nn.Module, reason: str) -> None:
        self.reason = reason  # why it is not one graph
        self.pieces: list[Piece] = []
        self._model = model
        self._call: Callable[[fx.GraphModule, Sequence[Any]], Any] | None = None

        def backend(graph: fx.GraphModule, example: Sequence[Any]) -> Graph:
            def call(*inputs: Any) -> Any:
                return graph(*inputs) if self._call is None else self._call(graph, inputs)

            return call

        self._compiled = torch.compile(model, backend=backend, dynamic=False)

    @property
    def parts(self) -> tuple[Capture, ...]:
        """The pieces that were exported."""
        return tuple(piece.captured for piece in self.pieces if piece.captured is not None)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of all pieces, in the order of the calls."""
        return tuple(region for part in self.parts for region in part.regions)

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """The matches of all pieces that were not kept."""
        return tuple(refusal for part in self.parts for refusal in part.refused)

    @property
    def names(self) -> dict[Region, str]:
        """A name for each region: where its weights are, or the number of its piece."""
        paths = {}
        owners = _owners(self._model)
        for number, piece in enumerate(self.pieces):
            if piece.captured is not None:
                for region in piece.captured.regions:
                    weights = [getattr(piece.captured.module, str(n.target), None) for n in _weights(region)]
                    found = [owners[id(weight)] for weight in weights if id(weight) in owners]
                    paths[region] = common_path(found) if found else f"graph_{number}"
        return numbered(paths)

    def runner(self, modules: Mapping[Capture, Graph]) -> "Runner":
        """The model with these in place of its pieces; a call of which there is no piece runs as it is."""
        return Runner(self, modules)

    def record(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the model once and note every call of a graph."""
        weights = {id(tensor): tensor for tensor in (*self._model.parameters(), *self._model.buffers())}
        calls: list[tuple[fx.GraphModule, tuple[Any, ...]]] = []

        def note(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            calls.append((graph, tuple(inputs)))
            return graph(*inputs)

        with self._calling(note):
            self._compiled(*args, **kwargs)
        for graph, inputs in calls:
            bound = tuple(weights.get(id(given)) for given in inputs)
            known = tuple(_form(i) if weight is None else weight for weight, i in zip(bound, inputs, strict=True))
            self.pieces.append(Piece(graph.code, known, _captured(graph, inputs, bound)))

    @contextmanager
    def _calling(self, call: Callable[[fx.GraphModule, Sequence[Any]], Any]) -> Iterator[None]:
        before, self._call = self._call, call
        limits: dict[str, Any] = {"recompile_limit": _GRAPHS, "accumulated_recompile_limit": _GRAPHS}
        try:
            with torch._dynamo.config.patch(limits):  # type: ignore[attr-defined]
                yield
        finally:
            self._call = before


class Runner(nn.Module):
    """The model with something in place of its pieces."""

    def __init__(self, pieces: Pieces, modules: Mapping[Capture, Graph]) -> None:
        super().__init__()
        self._pieces, self._instead = pieces, dict(modules)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's arguments -> its outputs."""
        left = iter(self._pieces.pieces)

        def call(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            piece = next(left, None)
            module = None if piece is None or piece.captured is None else self._instead.get(piece.captured)
            if piece is None or module is None or not piece.is_called_by(graph, inputs):
                return graph(*inputs)
            return module(*piece.rest(inputs))

        with self._pieces._calling(call):
            return self._pieces._compiled(*args, **kwargs)


def capture_or_pieces(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Capture | Pieces":
    """The model as one graph, or in pieces if it cannot be exported; NotCapturable if nothing is found in these either."""
    try:
        return capture(model, args, kwargs)
    except NotCapturable as fault:
        reason = fault.reason
    found = Pieces(model, reason)
    try:
        with torch.no_grad():
            found.record(args, kwargs)
    except Exception as fault:  # Dynamo runs the model's own code and reports in many types
        raise NotCapturable(f"{reason}; nor in pieces ({first_line(fault)})") from fault
    if not found.regions:
        raise NotCapturable(f"{reason}; the {len(found.pieces)} graphs between such places hold no known operation")
    return found


class _Bound(nn.Module):
    """A graph with its weights as parameters and buffers of its own, so that it is exported as a model is."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any], weights: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._graph, self._weights = [graph], [weight is not None for weight in weights]
        for number, weight in enumerate(weights):
            if isinstance(weight, nn.Parameter):
                self.register_parameter(f"weight_{number}", weight)
            elif weight is not None:
                self.register_buffer(f"weight_{number}", weight)

    def forward(self, *inputs: Any) -> Any:
        given = iter(inputs)
        return self._graph[0](
            *(getattr(self, f"weight_{number}") if bound else next(given) for number, bound in enumerate(self._weights))
        )


def _form(given: Any) -> Any:
    return (given.shape, given.dtype, given.device) if isinstance(given, Tensor) else given


def _captured(graph: fx.GraphModule, inputs: Sequence[Any], weights: Sequence[Tensor | None]) -> Capture | None:
    rest = [given for weight, given in zip(weights, inputs, strict=True) if weight is None]
    if not all(isinstance(given, Tensor) for given in rest):
        return None
    try:
        return capture(_Bound(graph, inputs, weights).eval(), rest, {})
    except NotCapturable:
        return None


def _weights(region: Region) -> list[fx.Node]:
    """The weights that a region reads, at its edge or inside."""
    nodes = {*region.inputs, *region.nodes, *(node for inner in region.nodes for node in inner.all_input_nodes)}
    return [node for node in nodes if node.op == "get_attr"]


def _owners(model: nn.Module) -> dict[int, str]:
    """The path of the module that holds each parameter and buffer."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {id(tensor): name.rpartition(".")[0] for name, tensor in reversed(named)}
