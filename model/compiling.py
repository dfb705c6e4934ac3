"""The forward pass of training, compiled or not."""

import torch
from torch import Tensor, nn


class Forward(nn.Module):
    """A model's forward pass, compiled or not: a wrapper such as DistributedDataParallel stays when compiling fails."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.call = model.__call__

    @property
    def compiled(self) -> bool:
        """Whether the compiler's code is in use."""
        return self.call != self.model.__call__

    def use_compiler(self) -> None:
        """Compile at the next call, for its shapes."""
        torch.compiler.reset()  # graphs of earlier shapes and runs count towards a limit
        self.call = torch.compile(self.model, fullgraph=True, dynamic=False).__call__

    def use_eager(self) -> None:
        """Call the model without compiling."""
        self.call = self.model.__call__

    def forward(self, *batch: Tensor) -> Tensor:
        """The model's loss."""
        return self.call(*batch)
