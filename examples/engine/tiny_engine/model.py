"""A Llama- or Qwen-shaped decoder over a paged cache. Tokens of all sequences lie in one row, without padding."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

import kvdock
from kvdock.scheduler import TableViews

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
MOVING_ROPE = ("dynamic", "longrope")  # whose angles follow from the length of the text


class Decoder:
    """Computes logits; device and dtype are the model's. Raises ValueError for a model of another shape.

    Args:
        model: a `LlamaForCausalLM` of Transformers, or one of Mistral, Qwen2 or Qwen3.
        config, rank: of the pool. Ranks that share its heads share weights, too, and add up what `_joined` gets.
    """

    def __init__(self, model: Any, config: kvdock.PagedKVCacheConfig, rank: kvdock.RankInfo | None = None) -> None:
        conf, rope = model.config, model.model.rotary_emb
        if conf.model_type not in FAMILIES or conf.hidden_act != "silu" or rope.rope_type in MOVING_ROPE:
            raise ValueError(f"expected one of {FAMILIES}, with silu and a rope that stays, got {type(model).__name__}")
        weights = dict(model.state_dict())
        self.embedding, self.head = weights.pop("model.embed_tokens.weight"), weights.pop("lm_head.weight")
        self.norm, self.eps = weights.pop("model.norm.weight"), conf.rms_norm_eps
        spec = kvdock.KVSpec.from_hf_config(conf, self.embedding.dtype)
        self.layers = [_layer(weights, f"model.layers.{index}.", layer.window) for index, layer in enumerate(spec.layers)]
        if weights:
            raise ValueError(f"{type(model).__name__} has weights that this decoder would not use: {sorted(weights)[:3]}")
        self.max_positions, self.dim = conf.max_position_embeddings, spec.layers[0].k_dim
        self.heads = [conf.num_attention_heads, spec.layers[0].num_k_heads, spec.layers[0].num_v_heads]
        self.cache = kvdock.create_cache(spec, config, rank or kvdock.RankInfo(self.embedding.device))
        places = torch.arange(self.max_positions, device=self.embedding.device)[None]
        self.cos, self.sin = (part[0, :, None] for part in rope(self.embedding[:1], places))  # [positions, 1, dim]

    @torch.no_grad()
    def __call__(self, tables: TableViews, tokens: torch.Tensor, longest: int | None = None) -> torch.Tensor:
        """Compute tokens ``[T]``, and return logits ``[rows, vocabulary]`` behind each row's last one.

        Args:
            tables: where each token goes, and what each row sees.
            tokens: ids; one of each row, or with ``longest`` any number, as ``tables.cu_query_lens`` says.
            longest: the most tokens of a row.
        """
        hidden, cos, sin = embedding(tokens, self.embedding), self.cos[tables.positions], self.sin[tables.positions]
        several = {} if longest is None else {"cu_query_lens": tables.cu_query_lens, "max_query_len": longest}
        for index, layer in enumerate(self.layers):
            q, k, v = linear(self._normed(hidden, layer.norm), *layer.qkv).unflatten(-1, (-1, self.dim)).split(self.heads, 1)
            q, k = (_rotated(self._normed(rows, norm), cos, sin) for rows, norm in zip((q, k), layer.head_norms, strict=True))
            # Keys and values are written to where they go, and attended to where they lie.
            pools = self.cache.update(index, k, v, tables.slot_mapping)
            seen = kvdock.ops.paged_attention(q, *pools, tables.block_table, tables.seq_lens, window=layer.window, **several)
            hidden = hidden + self._joined(linear(seen.flatten(1), *layer.out))
            gate, up = linear(self._normed(hidden, layer.mlp_norm), *layer.gate_up).chunk(2, -1)
            hidden = hidden + self._joined(linear(silu(gate) * up, *layer.down))
        last = hidden if longest is None else hidden[tables.cu_query_lens[1:] - 1]
        return linear(self._normed(last, self.norm), self.head)

    _joined = staticmethod(torch.nn.Identity())

    def _normed(self, rows: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        return rows if norm is None else rms_norm(rows, norm.shape, norm, self.eps)


def _rotated(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = rows.chunk(2, -1)
    return rows * cos + torch.cat((-second, first), -1) * sin


def _layer(weights: dict[str, torch.Tensor], prefix: str, window: int | None) -> SimpleNamespace:
    """Take a layer's weights, some joined; what a family does not have is None: biases, norms of heads."""

    def take(kind: str, *names: str) -> torch.Tensor | None:
        parts = [weights.pop(f"{prefix}{name}.{kind}", None) for name in names]
        return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)

    def linears(*names: str) -> list[torch.Tensor | None]:
        return [take(kind, *names) for kind in ("weight", "bias")]

    return SimpleNamespace(
        norm=take("weight", "input_layernorm"),
        qkv=linears("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        head_norms=[take("weight", "self_attn.q_norm"), take("weight", "self_attn.k_norm")],
        window=window,
        out=linears("self_attn.o_proj"),
        mlp_norm=take("weight", "post_attention_layernorm"),
        gate_up=linears("mlp.gate_proj", "mlp.up_proj"),
        down=linears("mlp.down_proj"),
    )
