"""What paceline adds to each of vLLM's workers: load weights from files, or from handles of another process's tensors.

vLLM imports this by name in every worker process (`worker_extension_cls`), with this folder on the import path, and
mixes the class into its worker: `self` has the worker's own `model_runner`.
"""

import base64
import hashlib
import importlib.util
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

_FINGERPRINT = Path(__file__).parents[2] / "sync" / "fingerprint.py"
_SEEN_SHARE = 0.9


class PacelineWeights:
    """Mixed into vLLM's worker. Method names carry the project's: an extension may not hide a worker's own."""

    def paceline_load(self, paths: list[str]) -> dict[str, Any]:
        """Loads safetensors files; the answer is what `replica.check_loaded` reads."""
        weights = {name: tensor for path in paths for name, tensor in load_file(path).items()}
        return self._paceline_take(weights)

    def paceline_load_ipc(self, handles: str) -> dict[str, Any]:
        """Loads tensors of another process on the same device, from what `vllm/ipc.py` made of them. Unverified."""
        by_uuid: dict[str, list[tuple[str, Any]]] = pickle.loads(base64.b64decode(handles))
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        if uuid not in by_uuid:
            raise ValueError(f"weights lie on devices {sorted(by_uuid)}, this worker computes on {uuid}")
        weights = {name: _rebuilt(handle) for name, handle in by_uuid[uuid]}
        answer = self._paceline_take(weights)
        torch.cuda.synchronize()  # the trainer may change its tensors once this returns
        return answer

    def paceline_load_tensors(self, weights: list[tuple[str, Tensor]]) -> dict[str, Any]:
        """Loads tensors of this process."""
        return self._paceline_take(dict(weights))

    def _paceline_take(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        received = _fingerprint(weights)
        model: nn.Module = self.model_runner.get_model()  # type: ignore[attr-defined]  # the worker's own
        expected = sum(tensor.numel() for tensor in weights.values())
        before = _digest(model, expected)
        self.model_runner.reload_weights(weights_iterator=iter(weights.items()))  # type: ignore[attr-defined]
        _pack_heads_again(model)
        return {"received": received, "before": before, "after": _digest(model, expected)}


def _pack_heads_again(model: nn.Module) -> None:
    """vLLM 0.32's CPU build multiplies by a packed copy of the output head, and its reload makes that copy anew only
    for heads that were given weights: one that shares the embedding's would go on with the old ones. Elsewhere nothing
    happens here."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _rebuilt(handle: Any) -> Tensor:
    function, arguments = handle
    listed = list(arguments)
    listed[6] = torch.cuda.current_device()  # the same device may have another number in this process
    tensor: Tensor = function(*listed)
    return tensor


def _fingerprint(weights: dict[str, Tensor]) -> str:
    spec = importlib.util.spec_from_file_location("paceline_fingerprint", _FINGERPRINT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.fingerprint(weights.items()))


def _digest(model: nn.Module, expected: int) -> str | None:
    """A short name for the parameters' bits, whatever their layout; None where a build keeps most of them out of sight
    (packed for its CPU kernels), so that nothing can be said."""
    digest, seen = hashlib.blake2b(digest_size=16), 0
    for name, tensor in _visible(model):
        seen += tensor.numel()
        digest.update(f"{name}{_bit_sum(tensor)}".encode())
    return digest.hexdigest() if seen >= _SEEN_SHARE * expected else None


def _visible(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.numel() and parameter.device.type != "meta":
            yield name, parameter.detach()


def _bit_sum(tensor: Tensor) -> int:
    """Sum of all values read as integers, modulo 2^64: moves with any one bit, and needs no copy to the host."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.contiguous().view(width).sum(dtype=torch.int64))
