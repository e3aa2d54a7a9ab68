"""Handles of the trainer's own CUDA tensors for a vLLM on the same device. Unverified: no test here has a device."""

import base64
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor


def ipc_handles(weights: Iterable[tuple[str, Tensor]]) -> str:
    """What `foreign/vllm_extension.py` makes tensors of again, by the device's UUID: numbers differ between processes.

    The tensors must live, and stay as they are, until the other side says that it has copied them.
    """
    by_uuid: dict[str, list[tuple[str, Any]]] = {}
    for name, tensor in weights:
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        by_uuid.setdefault(uuid, []).append((name, reduce_tensor(tensor.detach())))
    return base64.b64encode(pickle.dumps(by_uuid)).decode()
