"""Peak of live tensor bytes of decoder layers at their real size, computed by fake tensors: shapes without numbers."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig

from paceline.config.schema import TrainSection
from paceline.engine.recompute import apply_recompute, decoder_layers
from paceline.model.attention import AttentionArgs
from paceline.model.families import check_family
from paceline.model.fused.layers import fuse_layers
from paceline.model.loading import wrap_model


class LiveBytes(TorchDispatchMode):
    """Storages alive, `known` ones (parameters) left out."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self._known, self._alive = known, dict[int, tuple[StorageWeakRef, int]]()
        self.peak = 0

    def now(self) -> int:
        self._alive = {key: found for key, found in self._alive.items() if not found[0].expired()}
        return sum(size for _, size in self._alive.values())

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._known:
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return out


@torch.library.custom_op("paceline_planner_tests::attention", mutates_args=())
def _attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """An operator, so that selective recomputation sees it; only its shapes are ever computed."""
    raise NotImplementedError


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


class _GroupedAttention(torch.autograd.Function):
    """Keeps what a variable-length kernel with grouped heads keeps."""

    @staticmethod
    def forward(ctx, query, key, value):
        out, lse = _attention(query, key, value)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class GroupedPlan:
    """An attention plan over `_GroupedAttention`."""

    def attend(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, args: AttentionArgs) -> Tensor:
        return _GroupedAttention.apply(*(part.transpose(1, 2) for part in (query_BHTD, key_BKTD, value_BKTD)))


class KernelOutputs:
    """`Elementwise` whose methods take the memory of their results alone, as kernels do."""

    def add_rms_norm(self, x, added, weight, eps):
        total = x if added is None else torch.empty_like(x)
        return total, torch.empty_like(x), x.new_empty(len(x), dtype=torch.float32)

    def rms_norm_backward(self, grad, x, rstd, weight, residual_grad, with_normed):
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(x) if with_normed else None

    def rotate(self, qkv, query_weight, key_weight, cos, sin, layout):
        shape = (
            (len(qkv), layout.num_heads, layout.head_dim),
            (len(qkv), layout.num_kv_heads, layout.head_dim),
        )
        return qkv.new_empty(shape[0]), qkv.new_empty(shape[1])

    def rotate_backward(
        self, grad_query, grad_key, grad_value, qkv, query_weight, key_weight, cos, sin, layout
    ):
        weights = (
            None if weight is None else torch.empty_like(weight) for weight in (query_weight, key_weight)
        )
        return torch.empty_like(qkv), *weights

    def gate(self, gate_up):
        return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)

    def gate_backward(self, grad, gate_up, with_gated):
        return torch.empty_like(gate_up), torch.empty_like(grad) if with_gated else None


def layer_peaks(
    config: PretrainedConfig, num_tokens: int, settings: TrainSection, is_fused: bool = False
) -> tuple[int, int]:
    """(bytes kept after the forward pass, peak of the backward pass) of all layers, bfloat16."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = wrap_model(module, torch.device("cpu"), check_family(config, type(module)))
        for linear in model.module.modules():
            vars(linear).pop("forward", None)  # the CPU's own product
        if is_fused:
            assert fuse_layers(module, KernelOutputs()).num_layers
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        apply_recompute(decoder_layers(module, config.num_hidden_layers), settings)
        live = LiveBytes({p.untyped_storage()._cdata for p in module.parameters()})
        with live:
            hidden = torch.empty(1, num_tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
            rotary = module.base_model.rotary_emb(hidden, torch.arange(num_tokens)[None])
            for layer in module.base_model.layers:
                hidden = layer(
                    hidden, position_embeddings=rotary, attention_mask=None, paceline_plan=GroupedPlan()
                )
            kept, live.peak = live.now(), 0
            hidden.backward(torch.empty_like(hidden))
        return kept, live.peak
