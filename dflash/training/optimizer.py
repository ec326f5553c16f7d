"""AdamW on fp32 masters, kept as one flat buffer, so that a step is a few passes over memory.

The model may compute in bf16. Its gradients are added, as each parameter's backward ends, to a flat
fp32 buffer, and the masters are copied back into it after a step. The same buffer carries the
step's sums (weights, metrics, flags) in its tail, so data parallelism is one all-reduce of one
tensor (`dflash.training.group`).

Gradients arrive unnormalised: they are linear in the weights w, so they are scaled by 1/Σw once,
when the step's global Σw is known. A step whose gradient is not finite changes nothing and is
counted; the decision is made from the reduced gradient, so every rank makes the same one.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dflash.resource.training import Training


class FlatOptimizer:
    """Masters, gradients and moments of a module, flat; matrices first, then vectors.

    After construction `.grad` of the module's parameters stays None: gradients live in `gradient`.
    """

    def __init__(self, module: nn.Module, training: Training, *, sums: int, dtype: torch.dtype) -> None:
        """Takes over the module's parameters, which are fp32 now and are cast to `dtype` for computing.

        `sums` is the length of the tail that is reduced together with the gradient.
        """
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        # Decay is for matrices only, so they come first and form one slice.
        named.sort(key=lambda item: item[1].ndim < 2)
        self.names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._shapes = [parameter.shape for parameter in self._parameters]
        sizes = [parameter.numel() for parameter in self._parameters]
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        self.size = self._offsets[-1]
        matrices = sum(p.numel() for p in self._parameters if p.ndim >= 2)
        device = self._parameters[0].device

        self.masters = torch.empty(self.size, dtype=torch.float32, device=device)
        self.reduced = torch.zeros(self.size + sums, dtype=torch.float32, device=device)
        """What ranks add up: [gradient | sums]."""
        self.gradient = self.reduced[: self.size]
        self.sums = self.reduced[self.size :]

        # Only parameters are cast: rotary frequencies and other buffers keep their precision.
        self._cast = dtype != torch.float32
        for parameter, master, gradient in zip(
            self._parameters, self._views(self.masters), self._views(self.gradient), strict=True
        ):
            master.copy_(parameter.detach())
            parameter.data = master.to(dtype)
            parameter.grad = None
            parameter.register_post_accumulate_grad_hook(_adder(gradient))  # type: ignore[no-untyped-call]

        matrix, vector = nn.Parameter(self.masters[:matrices]), nn.Parameter(self.masters[matrices:])
        self._slices = [(matrix, self.gradient[:matrices]), (vector, self.gradient[matrices:])]
        self._slices = [(master, gradient) for master, gradient in self._slices if master.numel()]
        self._adam = torch.optim.AdamW(
            [
                {"params": [matrix], "weight_decay": training.weight_decay},
                {"params": [vector], "weight_decay": 0.0},
            ],
            betas=training.betas,
            fused=True,
        )
        for master, _ in self._slices:
            self._adam.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(master, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
            }
        self._clip = training.clip

    def zero(self) -> None:
        """Before a step's first backward."""
        self.reduced.zero_()

    @torch.no_grad()
    def step(
        self, learning_rate: float, weight_sum: Tensor, refused: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scale the reduced gradient by 1/Σw, clip it, update, and refresh the module's parameters.

        Returns (norm of the normalised gradient, 1.0 if the step was skipped), both on the device.
        A step of no weight (no valid anchor anywhere) is skipped too, as is one that is not finite,
        or that is refused by a number that is not zero.
        """
        norm = torch.linalg.vector_norm(self.gradient) / weight_sum
        usable = torch.isfinite(norm) & torch.isfinite(weight_sum) & (weight_sum > 0)
        if refused is not None:
            usable &= refused == 0
        skipped = (~usable).to(torch.float32)
        factor = torch.clamp(self._clip / (norm + 1e-6), max=1.0) / weight_sum
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        for master, gradient in self._slices:
            master.grad = gradient
        # The fused kernel divides by grad_scale and leaves everything alone where found_inf is 1: the
        # scaling, the clipping and the decision to skip cost no pass over memory and no device sync.
        self._adam.grad_scale = torch.where(usable, 1.0 / factor, 1.0)  # type: ignore[attr-defined]
        self._adam.found_inf = skipped  # type: ignore[attr-defined]
        self._adam.step()
        self.refresh()
        return norm, skipped

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the parameters that compute; in fp32 they are the same memory."""
        if not self._cast:
            return
        for parameter, view in zip(self._parameters, self._views(self.masters), strict=True):
            parameter.copy_(view)

    def state_tensors(self) -> list[Tensor]:
        """Everything that must be equal on all ranks, to broadcast in place: masters and moments."""
        tensors = [self.masters]
        for master, _ in self._slices:
            state = self._adam.state[master]
            tensors += [state["exp_avg"], state["exp_avg_sq"], state["step"]]
        return tensors

    def weights_on_host(self) -> dict[str, Tensor]:
        """fp32 masters by parameter name, copied to host memory."""
        return self._named(self.masters.detach().to("cpu", copy=True))

    def moments_on_host(self) -> dict[str, Tensor]:
        """Adam's moments by `exp_avg.<name>` and `exp_avg_sq.<name>`, and its `step`, in host memory."""
        tensors: dict[str, Tensor] = {}
        for key in ("exp_avg", "exp_avg_sq"):
            flat = torch.cat([self._adam.state[master][key].detach().cpu() for master, _ in self._slices])
            tensors |= {f"{key}.{name}": view for name, view in self._named(flat).items()}
        tensors["step"] = self._adam.state[self._slices[0][0]]["step"].detach().to("cpu", copy=True)
        return tensors

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Put back what the two methods above gave; KeyError or ValueError where it does not fit."""
        self._fill(self.masters, weights, "")
        for key in ("exp_avg", "exp_avg_sq"):
            flat = torch.empty_like(self.masters)
            self._fill(flat, moments, f"{key}.")
            start = 0
            for master, _ in self._slices:
                self._adam.state[master][key].copy_(flat[start : start + master.numel()])
                start += master.numel()
        for master, _ in self._slices:
            self._adam.state[master]["step"].copy_(moments["step"])
        self.refresh()

    def _fill(self, flat: Tensor, tensors: Mapping[str, Tensor], prefix: str) -> None:
        for name, view in zip(self.names, self._views(flat), strict=True):
            tensor = tensors[prefix + name]
            if tensor.shape != view.shape:
                raise ValueError(f"{prefix + name} has shape {list(tensor.shape)}, not {list(view.shape)}")
            view.copy_(tensor)

    def _views(self, flat: Tensor) -> list[Tensor]:
        bounds = zip(self._offsets[:-1], self._offsets[1:], self._shapes, strict=True)
        return [flat[start:end].view(shape) for start, end, shape in bounds]

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, self._views(flat), strict=True))


def _adder(view: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        view.add_(parameter.grad)
        parameter.grad = None

    return add
